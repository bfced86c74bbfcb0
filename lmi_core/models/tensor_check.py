"""Whether a checkpoint holds exactly the tensors that a model needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lmi_core.errors import ModelError
from lmi_core.models.expert_tensors import unread_experts
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.models.weights import is_transposed
from lmi_core.weights.checkpoint import Checkpoint
from lmi_core.weights.float_tensors import holds_same
from lmi_core.weights.fp8_checkpoint import FP8_DTYPES, goes_with_fp8, scale_problem
from lmi_core.weights.gguf.types import BLOCK_TYPES
from lmi_core.weights.mxfp4 import MXFP4_ENDINGS
from lmi_core.weights.quantized.stored_layers import StoredLayers
from lmi_core.weights.safetensors_file import TensorInfo
from lmi_core.weights.tensor_faults import tensor_faults

FLOAT_DTYPES = ("F32", "F16", "BF16")


def check_tensors(
    path: Path,
    spec: DecoderSpec,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, TensorInfo],
    quantized: StoredLayers,
    kv_scales: Sequence[str] = (),
) -> None:
    """Raise ModelError unless ``tensors`` are exactly what ``spec`` needs, which has ``shapes``,
    and ``kv_scales``: all faults at once. Of a model that pools, heads that it doesn't use may be
    there, too."""
    names = spec.names
    if not spec.has_head:
        prefix = names.embedding.partition(".")[0] + "."
        tensors = {n: t for n, t in tensors.items() if n.startswith(prefix) or n in shapes}
    if (unread := unread_experts(spec, shapes, tensors)) is not None:
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


def with_own_head(
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


def check_quantized(checkpoint: Checkpoint, quantized: StoredLayers) -> None:
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
