"""From a model directory to a decoder's spec and packed weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from lmi_core.errors import ModelError
from lmi_core.models.checkpoint import read_checkpoint
from lmi_core.models.family import WeightNames
from lmi_core.models.fp8_checkpoint import (
    FP8_DTYPE,
    check_quantization,
    goes_with_fp8,
    scale_of,
    scale_problem,
)
from lmi_core.models.hf_config import read_hf_config
from lmi_core.models.kv_scales import LayerScales, kv_scale_names, read_kv_scales
from lmi_core.models.registry import family_of
from lmi_core.models.rope_config import RopeOverride
from lmi_core.models.safetensors_file import TensorInfo
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weights import (
    DecoderWeights,
    LayerWeights,
    Linear,
    MappedFile,
    PackFormat,
    WeightBackend,
    WeightFormat,
    expected_shapes,
)
from lmi_core.ops.fp8_matrix import Fp8Matrix, Matrix, expand_scales
from lmi_core.ops.recorder import FloatArray

Quantization = Literal["int8", "int4", "fp8"]
_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the bytes loaded so far and in all."""

_NUMPY_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_BYTE_DTYPES = {FP8_DTYPE: np.uint8}
_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the engine needs of a model; ``dtype`` is that of the packed matrices."""

    path: Path
    spec: DecoderSpec
    weights: DecoderWeights
    dtype: WeightFormat
    """Activations; of the weights, what isn't quantised."""
    quantize: Quantization | None
    """What the layers' matrices are; fp8 also where the checkpoint had them so."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    kv_scales: tuple[LayerScales, ...] = ()
    """For an fp8 KV cache, of each layer; empty: the checkpoint has none."""


def load_model(
    path: Path,
    dtype: Literal["auto", "bf16", "fp32"] = "auto",
    *,
    quantize: Quantization | None = None,
    rope: RopeOverride | None = None,
    backend: WeightBackend | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Read, check and pack the model in directory ``path``.

    ``dtype`` auto: bf16 where the checkpoint is 16 bit, else fp32. ``quantize``: what the matrices
    of layers and head become; the head stays int8 with int4, whose errors would go straight into
    the logits, and the embedding as it is. ``rope``: instead of the checkpoint's rotary settings.
    ``backend``: None: native.
    Raises ModelError, naming every tensor that is missing, unexpected or of the wrong shape.
    """
    config = read_hf_config(path)
    check_quantization(config)
    if rope is not None:
        config = rope.apply(config)
    family = family_of(config.architecture)
    spec = family.read_spec(config)
    for token_id in config.eos_token_ids:
        if token_id >= spec.vocab_size:
            raise config.error(
                "eos_token_id", f"{token_id} is beyond the vocabulary of {spec.vocab_size}"
            )
    tensors = read_checkpoint(path)
    check_tensors(path, spec, family.names, tensors)
    weight_format = _stored_format(tensors, family.names) if dtype == "auto" else dtype
    scale_names = kv_scale_names(spec, family.names, tensors)
    needed = {name: tensors[name] for name in (*expected_shapes(spec, family.names), *scale_names)}
    reader = _TensorReader(
        needed | _scales_of(needed, tensors),
        backend or _native_backend(),
        weight_format,
        quantize,
        progress,
    )
    head_format: PackFormat = weight_format if quantize is None else "int8"
    weights = _load_weights(reader, spec, family.names, head_format)
    if reader.has_widened_fp8:
        _log.warning(
            "the checkpoint's fp8 weights are held as %s here; quantize=int8 keeps them as small "
            "as they are",
            weight_format,
        )
    return LoadedModel(
        path=path,
        spec=spec,
        weights=weights,
        dtype=weight_format,
        quantize=quantize or ("fp8" if reader.has_kept_fp8 else None),
        eos_token_ids=config.eos_token_ids,
        bos_token_id=config.bos_token_id,
        kv_scales=read_kv_scales(path, spec, family.names, scale_names, reader.vector),
    )


def check_tensors(
    path: Path, spec: DecoderSpec, names: WeightNames, tensors: Mapping[str, TensorInfo]
) -> None:
    """Raise ModelError unless ``tensors`` are exactly what ``spec`` needs, all faults at once."""
    expected = expected_shapes(spec, names)
    problems = []
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is None:
            problems.append(f"missing: {name} {list(shape)}")
        elif tensor.shape != shape:
            problems.append(f"wrong shape: {name} is {list(tensor.shape)}, expected {list(shape)}")
        elif tensor.dtype == FP8_DTYPE and len(shape) == 2 and name != names.embedding:
            if problem := scale_problem(tensor, tensors):
                problems.append(problem)
        elif tensor.dtype not in _NUMPY_DTYPES:
            problems.append(f"wrong dtype: {name} is {tensor.dtype}, must be F32, F16 or BF16")
    tolerated = set(kv_scale_names(spec, names, tensors))
    for name in tolerated:
        if tensors[name].dtype not in _NUMPY_DTYPES:
            dtype = tensors[name].dtype
            problems.append(f"wrong dtype: {name} is {dtype}, must be F32, F16 or BF16")
    if spec.tied_head:
        tolerated.add(f"{names.head}.weight")
    has_fp8 = any(tensor.dtype == FP8_DTYPE for tensor in tensors.values())
    for name, tensor in tensors.items():
        if name in expected or name in tolerated or name.endswith(names.ignored):
            continue
        if not (has_fp8 and goes_with_fp8(name)):
            problems.append(f"unexpected: {name} {list(tensor.shape)}")
    if not problems:
        return
    shown = problems[:_MAX_PROBLEMS]
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    raise ModelError(
        f"{path}: {len(problems)} of the tensors don't fit config.json ({spec.architecture}, "
        f"{spec.num_layers} layers):\n  " + "\n  ".join(shown),
        field="model",
    )


def _native_backend() -> WeightBackend:
    from lmi_core.ops.native import NativeWeights

    return NativeWeights()


def _stored_format(tensors: Mapping[str, TensorInfo], names: WeightNames) -> WeightFormat:
    return "fp32" if tensors[names.embedding].dtype == "F32" else "bf16"


def _scales_of(
    needed: Mapping[str, TensorInfo], tensors: Mapping[str, TensorInfo]
) -> dict[str, TensorInfo]:
    in_fp8 = (tensor for tensor in needed.values() if tensor.dtype == FP8_DTYPE)
    return {scale.name: scale for tensor in in_fp8 if (scale := scale_of(tensor, tensors))}


class _TensorReader:
    """Takes tensors out of their files, each once, and reports how far it is."""

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        backend: WeightBackend,
        weight_format: WeightFormat,
        quantize: Quantization | None,
        progress: Progress | None,
    ) -> None:
        self.has_kept_fp8 = self.has_widened_fp8 = False
        self._tensors = tensors
        self._backend = backend
        self._weight_format = weight_format
        self._quantize = quantize
        self._progress = progress
        self._files: dict[Path, MappedFile] = {}
        self._num_bytes_done = 0
        self._num_bytes = sum(tensor.num_bytes for tensor in tensors.values())

    def linear(
        self, prefixes: Sequence[str], *, gated: bool = False, format: PackFormat | None = None
    ) -> Linear:
        """The linear layers of these names as one; ``format``: None: that of layers."""
        weight_names = [f"{prefix}.weight" for prefix in prefixes]
        parts = [self._matrix(name) for name in weight_names]
        weight = self._backend.pack(
            parts, names=weight_names, format=format or self._layer_format(parts), gated=gated
        )
        self._release(weight_names)
        bias = None
        if f"{prefixes[0]}.bias" in self._tensors:
            bias = np.concatenate([self.vector(f"{prefix}.bias") for prefix in prefixes])
        return Linear(weight, bias)

    def tied_head(self, name: str, format: PackFormat) -> Linear:
        """The embedding packed as the output head; its source pages go, the mapping stays."""
        weight = self._backend.pack([self._view(name)], names=[name], format=format, gated=False)
        tensor = self._tensors[name]
        self._file(tensor.path).drop(tensor.offset, tensor.num_bytes)
        return Linear(weight)

    def vector(self, name: str) -> FloatArray:
        """A float32 copy."""
        values = _to_float32(self._view(name), self._tensors[name].dtype)
        self._release([name])
        return values

    def table(self, name: str) -> npt.NDArray[np.generic]:
        """The tensor as stored, mapped; fp16, which no kernel reads, as a float32 copy."""
        view = self._view(name)
        if self._tensors[name].dtype == "F16":
            view = _to_float32(view, "F16")
            self._release([name])
        else:
            self._advance(self._tensors[name].num_bytes)
        return view

    def _layer_format(self, parts: Sequence[Matrix]) -> PackFormat:
        if self._quantize is not None:
            return self._quantize
        in_fp8 = [isinstance(part, Fp8Matrix) for part in parts]
        if all(in_fp8) and self._backend.keeps_fp8:
            self.has_kept_fp8 = True
            return "fp8"
        self.has_widened_fp8 |= any(in_fp8)
        return self._weight_format

    def _matrix(self, name: str) -> Matrix:
        tensor = self._tensors[name]
        if tensor.dtype != FP8_DTYPE:
            return self._view(name)
        scale = scale_of(tensor, self._tensors)
        assert scale is not None
        return Fp8Matrix(
            self._view(name).view(np.uint8), expand_scales(self.vector(scale.name), tensor.shape)
        )

    def _view(self, name: str) -> npt.NDArray[np.generic]:
        tensor = self._tensors[name]
        raw = self._file(tensor.path).array(tensor.offset, tensor.num_bytes)
        dtype = np.dtype((_NUMPY_DTYPES | _BYTE_DTYPES)[tensor.dtype])
        if raw.ctypes.data % dtype.itemsize != 0:
            raw = raw.copy()
        return raw.view(dtype).reshape(tensor.shape)

    def _file(self, path: Path) -> MappedFile:
        if path not in self._files:
            self._files[path] = self._backend.open(path)
        return self._files[path]

    def _release(self, names: Sequence[str]) -> None:
        for name in names:
            tensor = self._tensors[name]
            self._file(tensor.path).drop(tensor.offset, tensor.num_bytes)
            self._advance(tensor.num_bytes)

    def _advance(self, num_bytes: int) -> None:
        self._num_bytes_done += num_bytes
        if self._progress is not None:
            self._progress(self._num_bytes_done, self._num_bytes)


def _to_float32(values: npt.NDArray[np.generic], dtype: str) -> FloatArray:
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def _load_weights(
    reader: _TensorReader, spec: DecoderSpec, names: WeightNames, head_format: PackFormat
) -> DecoderWeights:
    if spec.tied_head:
        head = reader.tied_head(names.embedding, head_format)
    else:
        head = reader.linear([names.head], format=head_format)
    return DecoderWeights(
        embedding=reader.table(names.embedding),
        layers=tuple(_load_layer(reader, spec, names, i) for i in range(spec.num_layers)),
        final_norm=reader.vector(names.final_norm),
        head=head,
    )


def _load_layer(
    reader: _TensorReader, spec: DecoderSpec, names: WeightNames, layer_id: int
) -> LayerWeights:
    prefix = names.layer.format(layer=layer_id)
    qk_norm = spec.attention.qk_norm
    return LayerWeights(
        attention_norm=reader.vector(prefix + names.attention_norm),
        qkv=reader.linear([prefix + names.q, prefix + names.k, prefix + names.v]),
        q_norm=reader.vector(prefix + names.q_norm) if qk_norm else None,
        k_norm=reader.vector(prefix + names.k_norm) if qk_norm else None,
        attention_output=reader.linear([prefix + names.attention_output]),
        mlp_norm=reader.vector(prefix + names.mlp_norm),
        gate_up=reader.linear([prefix + names.gate, prefix + names.up], gated=True),
        down=reader.linear([prefix + names.down]),
    )
