"""The tensors that a model needs, and whether a checkpoint holds exactly these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lmi_core.errors import ModelError
from lmi_core.models.expert_tensors import (
    expert_shapes,
    is_router,
    unread_experts,
    with_layout,
)
from lmi_core.models.kv_scales import KV_SCALE_ENDINGS, kv_scale_names
from lmi_core.models.spec import DecoderSpec, LatentSpec, layer_linears
from lmi_core.models.weight_names import WeightNames
from lmi_core.models.weights import bias_name, is_transposed, qk_norm_tensors
from lmi_core.weights.checkpoint import Checkpoint
from lmi_core.weights.float_tensors import FLOAT_DTYPES, holds_same
from lmi_core.weights.formats import WeightFormat
from lmi_core.weights.fp8_checkpoint import FP8_DTYPES, goes_with_fp8, scale_problem
from lmi_core.weights.gguf.types import BLOCK_TYPES
from lmi_core.weights.mxfp4 import MXFP4_ENDINGS
from lmi_core.weights.quantized.layout import Layout
from lmi_core.weights.quantized.stored_layers import NO_LAYERS, StoredLayers
from lmi_core.weights.safetensors_file import TensorInfo
from lmi_core.weights.tensor_faults import tensor_faults

_LANGUAGE_MODEL = "language_model."
"""In names of a multimodal model's tensors that are its language model's."""
_OLD_NAMES = {"embed_out.weight": "lm_head.weight"}
_OLD_ENDINGS = {".gamma": ".weight", ".beta": ".bias"}
"""Of norms' tensors, in checkpoints that were once TensorFlow's."""
_WRAPPERS = ("module.", "_orig_mod.", "base_model.model.")
"""What training in parallel, torch.compile and PEFT put before every name."""
_NOT_LANGUAGE = ("vision_tower.", "multi_modal_projector.")


class HeldTensors(NamedTuple):
    """What a checkpoint holds of a model, by the names that our weights have."""

    spec: DecoderSpec
    """With the head and the layout of experts that the tensors are of."""
    tensors: Mapping[str, TensorInfo]
    shapes: dict[str, tuple[int, ...]]
    """Of what the spec needs."""
    quantized: StoredLayers
    """The matrices among it that are in integers."""
    kv_scales: tuple[str, ...]
    """The tensors that are scales of an fp8 KV cache."""
    stored_format: WeightFormat
    """What weights and activations are where nobody says it: as the checkpoint, or bf16."""


def held_tensors(checkpoint: Checkpoint, layout: Layout | None, spec: DecoderSpec) -> HeldTensors:
    """What ``checkpoint``, whose matrices may be as ``layout`` says, holds of the model of
    ``spec``. Raises as ``check_tensors``."""
    tensors, is_gguf = checkpoint.tensors, checkpoint.gguf_architecture is not None
    if not is_gguf:
        tensors = _text_tensors(tensors, spec.names)
    spec = _with_own_head(spec, tensors, is_part="text_config" in checkpoint.config.values)
    if spec.experts is not None:
        spec = with_layout(spec, tensors)
    names, shapes = spec.names, expected_shapes(spec)
    kv_scales: tuple[str, ...] = ()
    if any(name.endswith(KV_SCALE_ENDINGS) for name in tensors):
        kv_scales = kv_scale_names(spec, names, tensors)
    quantized = NO_LAYERS
    if layout is not None:
        tables = (names.embedding, names.positions, names.token_types, names.relative_bias)
        # Quantisers make layers of GPT-2's matrices as others have them: [outputs, inputs].
        matrices = {
            name: shape[::-1] if is_transposed(spec, name) else shape
            for name, shape in shapes.items()
            if name not in tables
        }
        quantized = StoredLayers(layout, matrices, tensors)
    _check_quantized(checkpoint, quantized)
    check_tensors(checkpoint.path, spec, shapes, tensors, quantized, kv_scales)
    deciding = _unrounded(spec, shapes) if is_gguf else [names.embedding]
    is_fp32 = any(tensors[name].dtype == "F32" for name in deciding)
    stored_format: WeightFormat = "fp32" if is_fp32 else "bf16"
    return HeldTensors(spec, tensors, shapes, quantized, kv_scales, stored_format)


def _unrounded(spec: DecoderSpec, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """A GGUF file's matrices, each of any type, of which none is rounded but routers, which
    converters widen."""
    matrices = [name for name, shape in shapes.items() if len(shape) > 1]
    return [n for n in matrices if not is_router(spec, n) and not n.endswith(".bias")]


def _text_tensors(tensors: Mapping[str, TensorInfo], names: WeightNames) -> dict[str, TensorInfo]:
    """A checkpoint's tensors by the names that ``names`` are of: a multimodal model's without those
    of its other parts, those of a file that was saved without its head with their prefix, and older
    names as today's."""
    tensors = _renamed(tensors)
    prefix = names.embedding.partition(".")[0] + "."
    adds_prefix = names.embedding.removeprefix(prefix) in tensors
    kept = {}
    for name, tensor in tensors.items():
        if name.removeprefix("model.").startswith(_NOT_LANGUAGE):
            continue
        ours = _OLD_NAMES.get(name, name.replace(_LANGUAGE_MODEL, "", 1))
        if adds_prefix and not ours.startswith((prefix, names.head)):
            ours = prefix + ours
        kept[ours] = tensor if ours == name else replace(tensor, name=ours)
    return kept


def _renamed(tensors: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    """Without wrappers that every name has, and with today's endings."""
    wrapper = next((w for w in _WRAPPERS if tensors and all(n.startswith(w) for n in tensors)), "")
    renamed = {}
    for name, tensor in tensors.items():
        ours = name.removeprefix(wrapper)
        for old, new in _OLD_ENDINGS.items():
            ours = ours.removesuffix(old) + new if ours.endswith(old) else ours
        renamed[ours] = tensor if ours == name else replace(tensor, name=ours)
    return renamed if not wrapper else _renamed(renamed)


def check_tensors(
    path: Path,
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, TensorInfo],
    quantized: StoredLayers = NO_LAYERS,
    kv_scales: Sequence[str] = (),
) -> None:
    """Raise ModelError unless ``tensors`` are exactly what ``spec`` needs, which has ``shapes``,
    and ``kv_scales``: all faults at once. Of a model that pools, heads that it doesn't use may be
    there, too."""
    names = spec.names
    if not spec.has_head:
        prefix = names.embedding.partition(".")[0] + "."
        tensors = {n: t for n, t in tensors.items() if n.startswith(prefix) or n in shapes}
    unread = None if spec.experts is None else unread_experts(spec, shapes, tensors)
    if unread is not None:
        raise ModelError(
            f"{path}: {unread} is of experts in common tensors, of which floats, fp8 (not "
            "transposed) and gpt-oss's MXFP4 can be read: fetch a checkpoint whose experts have "
            "tensors of their own, or are in one of these",
            field="model",
        )
    known: set[str] = set()
    problems = []
    for name, shape in shapes.items():
        if name in quantized:
            problems += quantized.problems(name)
            known |= quantized.tensors_of(name).keys()
        else:
            problems += _problems(name, shape, spec, tensors)
            known.add(name)
    scales = [tensors[name] for name in kv_scales]
    problems += [_dtype_problem(tensor) for tensor in scales if not _is_float(tensor)]
    known |= {*kv_scales, *quantized.spare_biases, *quantized.ignored}
    if spec.tied_head:
        known.add(f"{names.head}.weight")
    further = range(spec.num_layers, spec.num_layers + names.ignored_layers)
    prefixes = tuple(names.layer.format(layer=layer_id) for layer_id in further)
    known |= {name for name in tensors if name.startswith(prefixes)}
    problems += _unexpected(names, tensors, known)
    if problems:
        what = f"don't fit config.json ({spec.architecture}, {spec.num_layers} layers)"
        raise tensor_faults(path, what, problems, field="model")


def _with_own_head(
    spec: DecoderSpec, tensors: Mapping[str, TensorInfo], *, is_part: bool
) -> DecoderSpec:
    """``spec``, not tied where a checkpoint has a head that differs from its embedding, whatever
    config.json says; of a multimodal model (``is_part``) where it has a head at all."""
    head, embedding = f"{spec.names.head}.weight", spec.names.embedding
    if is_part:
        return replace(spec, tied_head=head not in tensors)
    if not spec.tied_head or head not in tensors or embedding not in tensors:
        return spec
    if holds_same(tensors[head], tensors[embedding]):
        return spec
    note = (
        f"tie_word_embeddings is true, or absent, but {head} differs from {embedding}: it is the "
        "output head, as in Transformers 5, where earlier ones leave it out"
    )
    return replace(spec, tied_head=False, notes=(*spec.notes, note))


def _check_quantized(checkpoint: Checkpoint, quantized: StoredLayers) -> None:
    """Raise ModelError where the settings name a quantisation that no matrix has."""
    settings = checkpoint.quantization
    if settings is None or quantized:
        return
    tensors = checkpoint.tensors
    coded = (*FP8_DTYPES, *BLOCK_TYPES)
    if any(tensor.dtype in coded for tensor in tensors.values()):
        return
    if any(name.endswith(MXFP4_ENDINGS[0]) for name in tensors):
        return
    raise settings.error(
        "quant_method",
        f"is {settings.method[:40]!r}, but no matrix is stored so: fetch the quantised files, or "
        "remove the quantisation's settings to serve these weights as they are",
    )


def _problems(
    name: str, shape: tuple[int, ...], spec: DecoderSpec, tensors: Mapping[str, TensorInfo]
) -> list[str]:
    tensor = tensors.get(name)
    if tensor is None:
        return [f"missing: {name} {list(shape)}"]
    if tensor.shape != shape:
        return [f"wrong shape: {name} is {list(tensor.shape)}, expected {list(shape)}"]
    may_be_fp8 = (len(shape) == 2 and name != spec.names.embedding) or (
        len(shape) == 3 and spec.experts is not None and spec.experts.layout == "merged"
    )
    if tensor.dtype in FP8_DTYPES and may_be_fp8:
        problem = scale_problem(tensor, tensors, transposed=is_transposed(spec, name))
        return [problem] if problem else []
    if tensor.dtype in BLOCK_TYPES and len(shape) > 1:
        return []
    if tensor.dtype == "U8" and name.endswith(MXFP4_ENDINGS):
        return []
    return [] if _is_float(tensor) else [_dtype_problem(tensor)]


def _is_float(tensor: TensorInfo) -> bool:
    return tensor.dtype in FLOAT_DTYPES


def _dtype_problem(tensor: TensorInfo) -> str:
    return f"wrong dtype: {tensor.name} is {tensor.dtype}, must be F32, F16 or BF16"


def _unexpected(
    names: WeightNames, tensors: Mapping[str, TensorInfo], known: set[str]
) -> list[str]:
    has_fp8 = any(tensor.dtype in FP8_DTYPES for tensor in tensors.values())
    return [
        f"unexpected: {name} {list(tensor.shape)}"
        for name, tensor in tensors.items()
        if name not in known
        and not name.endswith(names.ignored)
        and not (has_fp8 and goes_with_fp8(name))
    ]


def expected_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this spec holds."""
    names, hidden = spec.names, spec.hidden_size
    columns = spec.embedding_size or hidden
    shapes: dict[str, tuple[int, ...]] = {names.embedding: (spec.vocab_size, columns)}
    if names.positions:
        shapes[names.positions] = (spec.num_positions, hidden)
    if names.token_types:
        shapes[names.token_types] = (spec.num_token_types, hidden)
    if names.relative_bias:
        shapes[names.relative_bias] = (spec.attention.relative_buckets, spec.attention.num_q_heads)
    if names.project_in:
        shapes[f"{names.project_in}.weight"] = (hidden, columns)
        shapes[f"{names.project_out}.weight"] = (columns, hidden)
    shapes |= _norm_shapes(spec, names.embedding_norm, names.final_norm)
    for made in spec.head_layers:
        shapes |= made.shapes
    if spec.has_head and not spec.tied_head:
        shapes[f"{names.head}.weight"] = (spec.vocab_size, columns)
    if spec.has_head and spec.head_bias:
        shapes[f"{names.head}.bias"] = (spec.vocab_size,)
    for layer_id in range(spec.num_layers):
        prefix = names.layer.format(layer=layer_id)
        layer = _layer_shapes(spec, layer_id)
        if spec.experts is not None and spec.experts.sparse[layer_id]:
            layer |= expert_shapes(spec.experts, spec.hidden_size)
        shapes |= {prefix + name: shape for name, shape in layer.items()}
    if spec.first_layer_normed:
        for name in (names.attention_norm, bias_name(names.attention_norm)):
            shapes.pop(names.layer.format(layer=0) + name, None)
    return shapes


def _norm_shapes(spec: DecoderSpec, *names: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        if name and spec.norm.has_weight:
            shapes[name] = (spec.hidden_size,)
            if spec.norm.bias:
                shapes[bias_name(name)] = (spec.hidden_size,)
    return shapes


def _layer_shapes(spec: DecoderSpec, layer_id: int) -> dict[str, tuple[int, ...]]:
    names, attention = spec.names, spec.attention
    norms = (names.attention_norm, names.attention_post_norm, names.mlp_norm, names.mlp_post_norm)
    shapes, head_norms = _norm_shapes(spec, *norms), _qk_norm_shapes(spec)
    for source in layer_linears(spec, layer_id).values():
        for name, num_outputs in source.modules:
            shape = num_outputs, source.num_inputs
            shapes[f"{name}.weight"] = shape[::-1] if names.transposed else shape
            if source.bias:
                shapes[f"{name}.bias"] = (num_outputs,)
    if names.sinks:
        shapes[names.sinks] = (attention.num_q_heads,)
    if attention.latent is not None:
        shapes |= _latent_shapes(attention.latent, spec.hidden_size, attention.num_q_heads)
    return shapes | head_norms


def _latent_shapes(latent: LatentSpec, hidden: int, num_heads: int) -> dict[str, tuple[int, ...]]:
    """Of a layer's tensors of latent attention, but for the output's."""
    names, rank = latent.names, latent.kv_rank
    q_size = num_heads * (latent.nope_dim + latent.rope_dim)
    biased = {names.kv_a: rank + latent.rope_dim}
    shapes: dict[str, tuple[int, ...]] = {f"{names.q}.weight": (q_size, hidden)}
    if latent.q_rank:
        biased[names.q_a] = latent.q_rank
        shapes = {names.q_a_norm: (latent.q_rank,)}
        shapes[f"{names.q_b}.weight"] = (q_size, latent.q_rank)
    shapes[names.kv_a_norm] = (rank,)
    if len(names.kv_b) == 1:
        shapes[names.kv_b[0]] = (num_heads * (latent.nope_dim + latent.value_dim), rank)
    else:
        shapes[names.kv_b[0]] = (num_heads, rank, latent.nope_dim)
        shapes[names.kv_b[1]] = (num_heads, latent.value_dim, rank)
    for name, size in biased.items():
        shapes[f"{name}.weight"] = (size, hidden)
        if latent.bias:
            shapes[f"{name}.bias"] = (size,)
    return shapes


def _qk_norm_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Of the tensors that norm queries and keys."""
    attention, names = spec.attention, spec.names
    shapes: dict[str, tuple[int, ...]] = {}
    for name, num_heads in (
        (names.q_norm, attention.num_q_heads),
        (names.k_norm, attention.num_kv_heads),
    ):
        shape: tuple[int, ...] = (attention.head_dim,)
        if attention.qk_norm == "row":
            shape = (num_heads * attention.head_dim,)
        elif attention.qk_norm == "layers" and "{head}" not in name:
            shape = (num_heads, attention.head_dim)
        if attention.qk_norm:
            shapes |= dict.fromkeys(qk_norm_tensors(name, num_heads), shape)
        if attention.qk_norm == "layer":
            shapes[bias_name(name)] = shape
    return shapes
