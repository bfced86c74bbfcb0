"""A decoder's weights, taken out of a checkpoint layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmi_core.models.experts import load_experts
from lmi_core.models.latent_attention import load_latent
from lmi_core.models.linears import LayerLinear, layer_linears, rotate_half_order
from lmi_core.models.slices import WHOLE, Slicing
from lmi_core.models.smoothing import LayerFactors, divided
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.tensor_reader import TensorReader
from lmi_core.models.weights import (
    DecoderWeights,
    LayerWeights,
    Linear,
    Norm,
    bias_name,
    qk_norm_tensors,
)
from lmi_core.weights.formats import FloatArray, PackFormat
from lmi_core.weights.matrix import as_floats, unit_rows


def load_decoder(
    reader: TensorReader,
    spec: DecoderSpec,
    head_format: PackFormat,
    factors: Sequence[LayerFactors],
    *,
    fuses_gate: bool,
    slicing: Slicing = WHOLE,
) -> DecoderWeights:
    """All that ``spec`` has, with as many layers as there are ``factors``, or of it what
    ``slicing`` says."""
    names = spec.names
    head: Linear | None = None
    tokens = slice(*slicing.vocabulary(spec.vocab_size)) if slicing.num_ranks > 1 else None
    heads = slice(*slicing.q_heads(spec.attention.num_q_heads))
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
    return DecoderWeights(
        embedding=reader.table(names.embedding),
        positions=reader.table(names.positions) if names.positions else None,
        token_types=reader.floats(names.token_types) if names.token_types else None,
        relative_bias=reader.vector(names.relative_bias)[:, heads] if names.relative_bias else None,
        embedding_norm=_load_norm(reader, spec, "", names.embedding_norm),
        project_in=projections[0],
        project_out=projections[1],
        layers=tuple(
            load_layer(reader, spec, i, of_layer, fuses_gate=fuses_gate, slicing=slicing)
            for i, of_layer in enumerate(factors)
        ),
        final_norm=_load_norm(reader, spec, "", names.final_norm, spec.logit_scale),
        head=head,
    )


def load_whole_head(reader: TensorReader, spec: DecoderSpec) -> Linear:
    """The output head in int8, for drafts alone, of a model whose ranks have parts of it."""
    name = spec.names.embedding if spec.tied_head else f"{spec.names.head}.weight"
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
        source = sources.get(linear)
        if source is None:
            return None
        rows, divisors = source.rows, factors.rows.get(linear)
        if (own := slicing.rows(spec, linear, source, inner)) is not None:
            rows = own if rows is None else rows[own]
            divisors = None if divisors is None else divisors[own]
        return reader.linear(
            [prefix + name for name, _ in source.modules],
            gated=gated,
            rows=rows,
            transposed=names.transposed,
            inputs=slicing.inputs(linear, source, attention.num_q_heads),
            column_factors=factors.columns.get(linear),
            row_divisors=divisors,
        )

    def norm(name: str, reader_of_it: LayerLinear) -> Norm | None:
        loaded, by = _load_norm(reader, spec, prefix, name), factors.columns.get(reader_of_it)
        return loaded if loaded is None or by is None else divided(loaded, by)

    sources = layer_linears(spec, layer_id)
    inner = sources[LayerLinear.DOWN].num_inputs if LayerLinear.DOWN in sources else 0
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
