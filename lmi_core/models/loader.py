"""From a model that was found to its weights, packed layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lmi_core.models.eagle_head import EagleHead
from lmi_core.models.experts import load_experts
from lmi_core.models.found_model import FoundModel
from lmi_core.models.kv_scales import LayerScales, read_kv_scales
from lmi_core.models.latent_attention import load_latent
from lmi_core.models.pooling import PoolingSpec
from lmi_core.models.pooling_head import PoolingHead
from lmi_core.models.pooling_layers import load_pooling_head
from lmi_core.models.slices import WHOLE, SlicedLinear, Slicing
from lmi_core.models.smoothing import LayerFactors, Smoothing, divided
from lmi_core.models.spec import DecoderSpec, LayerLinear, layer_linears, rotate_half_order
from lmi_core.models.tensor_reader import Progress, TensorReader
from lmi_core.models.weight_packing import WeightPacking
from lmi_core.models.weights import (
    DecoderWeights,
    LayerWeights,
    Linear,
    Norm,
    WeightPacker,
    answer_matrix,
    bias_name,
    qk_norm_tensors,
)
from lmi_core.weights.formats import FloatArray, WeightFormat
from lmi_core.weights.matrix import as_floats, unit_rows

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the engine needs of a model; ``dtype`` is that of the packed matrices."""

    spec: DecoderSpec
    whole_spec: DecoderSpec
    """Of the model of which ``spec`` is a slice."""
    weights: DecoderWeights
    dtype: WeightFormat
    """Activations; of the weights, what isn't quantised."""
    quantize: str | None
    """What the layers' matrices are, also where the checkpoint had them so."""
    eos_token_ids: tuple[int, ...]
    pooling: PoolingSpec | None = None
    """What its prompts are pooled to; None: it generates."""
    head: PoolingHead | None = None
    slicing: Slicing = WHOLE
    """What of the model this is."""
    whole_head: Linear | None = None
    """The output head of the whole model, where a head that drafts has none."""
    kv_scales: tuple[LayerScales, ...] = ()
    """For an fp8 KV cache, of each layer; empty: the checkpoint has none."""


def load_weights(
    found: FoundModel,
    packer: WeightPacker,
    progress: Progress | None = None,
    smoothing: Smoothing | None = None,
) -> LoadedModel:
    """Read and pack the weights of the model that ``find_model`` found, of them what its
    ``slicing`` says.

    What is quantised is the matrices of layers and head; the head stays int8 with int4, whose
    errors would go straight into the logits, and the embedding as it is. Layers that the checkpoint
    has in integers are kept so, and everything else as it is.
    Where there may be LoRA adapters, gate and up aren't packed for an activation in the linear
    itself, which adapters must come before. ``smoothing``: of a model that is quantised so.
    Raises ModelError for damage inside of tensors.
    """
    path, spec, slicing = found.asked.model, found.spec, found.slicing
    for note in found.notes:
        _log.warning("%s: %s", path, note)
    if spec.rounds_embedding_scale and found.dtype == "bf16":
        spec = replace(spec, embedding_scale=_to_bf16(spec.embedding_scale))
    factors = _layer_factors(spec, smoothing, keeps_values=bool(found.kv_scales))
    packing = WeightPacking(
        packer,
        found.dtype,
        found.quantize,
        keeps_halves=found.checkpoint.gguf_architecture is not None,
        keeps_orders=found.keeps_orders,
    )
    reader = TensorReader(found, packing, progress)
    fuses_gate = found.asked.lora is None
    weights = load_decoder(reader, spec, factors, fuses_gate=fuses_gate, slicing=slicing)
    whole_head, pooling_head = None, None
    kv_scales: tuple[LayerScales, ...] = ()
    if slicing.num_ranks > 1 and isinstance(found.heads, EagleHead) and not found.heads.has_head:
        whole_head = _load_whole_head(reader, spec)
    if found.pooling is not None:
        pooling_head = load_pooling_head(reader, path, spec, found.pooling)
    if found.kv_scales:
        kv_scales = read_kv_scales(path, spec, found.kv_scales, reader.vector)
    reader.check_files()
    packing.report()
    return LoadedModel(
        quantize=found.quantize or packing.kept_format,
        spec=slicing.spec(spec) if slicing.num_ranks > 1 else spec,
        whole_spec=spec,
        weights=weights,
        dtype=found.dtype,
        eos_token_ids=found.config.eos_token_ids,
        pooling=found.pooling,
        head=pooling_head,
        slicing=slicing,
        whole_head=whole_head,
        kv_scales=kv_scales,
    )


def _to_bf16(value: float) -> float:
    """The nearest, ties to even."""
    bits = int(np.float32(value).view(np.uint32))
    return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))


def _layer_factors(
    spec: DecoderSpec, smoothing: Smoothing | None, *, keeps_values: bool
) -> tuple[LayerFactors, ...]:
    if smoothing is None:
        return (LayerFactors(),) * spec.num_layers
    layers = range(spec.num_layers)
    return tuple(smoothing.factors(spec, i, keeps_values=keeps_values) for i in layers)


def load_decoder(
    reader: TensorReader,
    spec: DecoderSpec,
    factors: Sequence[LayerFactors],
    *,
    fuses_gate: bool,
    slicing: Slicing = WHOLE,
) -> DecoderWeights:
    """All that ``spec`` has, with as many layers as there are ``factors``, or of it what
    ``slicing`` says."""
    names, head_format = spec.names, reader.packing.head_format
    layers = tuple(
        load_layer(reader, spec, i, of_layer, fuses_gate=fuses_gate, slicing=slicing)
        for i, of_layer in enumerate(factors)
    )
    embedding_norm = _load_norm(reader, spec, "", names.embedding_norm)
    final_norm = _load_norm(reader, spec, "", names.final_norm, spec.logit_scale)
    head: Linear | None = None
    tokens = slice(*slicing.vocabulary(spec.vocab_size)) if slicing.num_ranks > 1 else None
    if not spec.has_head:
        pass
    elif spec.tied_head:
        head = reader.tied_head(names.embedding, names.head, head_format, tokens)
    else:
        rows = None if tokens is None else np.arange(tokens.start, tokens.stop)
        head = reader.linear([names.head], format=head_format, rows=rows, normed=spec.normed_head)
    projections = [
        reader.linear([name], format=head_format) if name else None
        for name in (names.project_in, names.project_out)
    ]
    relative_bias = None
    if names.relative_bias:
        own_heads = slice(*slicing.q_heads(spec.attention.num_q_heads))
        relative_bias = reader.vector(names.relative_bias)[:, own_heads]
    return DecoderWeights(
        embedding=reader.table(names.embedding),
        positions=reader.table(names.positions) if names.positions else None,
        token_types=reader.floats(names.token_types) if names.token_types else None,
        relative_bias=relative_bias,
        embedding_norm=embedding_norm,
        project_in=projections[0],
        project_out=projections[1],
        layers=layers,
        final_norm=final_norm,
        head=head,
    )


def _load_whole_head(reader: TensorReader, spec: DecoderSpec) -> Linear:
    """The output head in int8, for drafts alone, of a model whose ranks have parts of it."""
    name = answer_matrix(spec)
    matrix = reader.matrix(name)
    if spec.normed_head:
        [floats] = as_floats([matrix])
        matrix = unit_rows(floats)
    weight = reader.packing.pack([matrix], [f"whole {name}"], format="int8")
    return Linear(weight)


def load_layer(
    reader: TensorReader,
    spec: DecoderSpec,
    layer_id: int,
    factors: LayerFactors,
    *,
    fuses_gate: bool,
    slicing: Slicing = WHOLE,
) -> LayerWeights:
    """One layer, whose linears' inputs are divided as ``factors`` say."""
    names, attention = spec.names, spec.attention
    prefix = names.layer.format(layer=layer_id)

    def linear(linear: LayerLinear, *, gated: bool = False) -> Linear | None:
        if linear not in linears:
            return None
        source, own, inputs = linears[linear]
        rows, divisors = source.rows, factors.rows.get(linear)
        if own is not None:
            rows = own if rows is None else rows[own]
            divisors = None if divisors is None else divisors[own]
        return reader.linear(
            [prefix + name for name, _ in source.modules],
            gated=gated,
            rows=rows,
            transposed=names.transposed,
            inputs=inputs,
            column_factors=factors.columns.get(linear),
            row_divisors=divisors,
        )

    def norm(name: str, reader_of_it: LayerLinear) -> Norm | None:
        loaded, by = _load_norm(reader, spec, prefix, name), factors.columns.get(reader_of_it)
        return loaded if loaded is None or by is None else divided(loaded, by)

    sources, q_heads, kv_heads = layer_linears(spec, layer_id), slice(None), slice(None)
    linears = {linear: SlicedLinear(source) for linear, source in sources.items()}
    if slicing != WHOLE:
        linears = slicing.linears(spec, sources)
        q_heads = slice(*slicing.q_heads(attention.num_q_heads))
        kv_heads = slice(*slicing.kv_heads(attention.num_kv_heads))
    output = linear(LayerLinear.ATTENTION_OUTPUT)
    assert output is not None
    experts, shared = None, None
    if spec.experts is not None and spec.experts.sparse[layer_id]:
        experts, shared = load_experts(reader, spec, spec.experts, layer_id, slicing)
    has_norm = layer_id > 0 or not spec.first_layer_normed
    return LayerWeights(
        attention_norm=norm(names.attention_norm * has_norm, LayerLinear.QKV),
        qkv=linear(LayerLinear.QKV),
        latent=None if attention.latent is None else load_latent(reader, spec, prefix, slicing),
        q_norm=_load_qk_norm(reader, spec, prefix, names.q_norm, attention.num_q_heads, q_heads),
        k_norm=_load_qk_norm(reader, spec, prefix, names.k_norm, attention.num_kv_heads, kv_heads),
        sinks=reader.vector(prefix + names.sinks)[q_heads] if names.sinks else None,
        attention_output=output,
        attention_post_norm=_load_norm(reader, spec, prefix, names.attention_post_norm),
        mlp_norm=norm(names.mlp_norm, LayerLinear.GATE_UP),
        gate_up=linear(LayerLinear.GATE_UP, gated=fuses_gate and spec.gated),
        down=linear(LayerLinear.DOWN),
        experts=experts,
        shared_expert=shared,
        mlp_post_norm=_load_norm(reader, spec, prefix, names.mlp_post_norm),
    )


def _load_norm(
    reader: TensorReader, spec: DecoderSpec, prefix: str, name: str, scale: float = 1.0
) -> Norm | None:
    """``scale``: of its results."""
    if not name:
        return None
    if not spec.norm.has_weight:
        return Norm(None if scale == 1.0 else np.full(spec.hidden_size, scale, np.float32))
    offset, factor = np.float32(spec.norm.offset), np.float32(scale)
    weight = (reader.vector(prefix + name) + offset) * factor
    return Norm(
        weight, reader.vector(prefix + bias_name(name)) * factor if spec.norm.bias else None
    )


def _load_qk_norm(
    reader: TensorReader, spec: DecoderSpec, prefix: str, name: str, num_heads: int, own: slice
) -> Norm | None:
    """For every one of these heads where they aren't all normed by one weight, in our order of
    dimensions."""
    qk_norm, head_dim = spec.attention.qk_norm, spec.attention.head_dim
    if not qk_norm:
        return None
    order = rotate_half_order(spec)

    def read(tensors: list[str]) -> FloatArray:
        heads = np.concatenate([reader.vector(prefix + tensor).ravel() for tensor in tensors])
        heads = heads.reshape(-1, head_dim)
        if qk_norm != "head":
            heads = np.broadcast_to(heads, (num_heads, head_dim))[own]
        return np.ascontiguousarray(heads if order is None else heads[:, order]).ravel()

    weight = read(qk_norm_tensors(name, num_heads)) + np.float32(spec.norm.offset)
    return Norm(weight, read([bias_name(name)]) if qk_norm == "layer" else None)
