"""Tensors of heads that draft for a model, checked against what the model's sizes make of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lmi_core.errors import ModelError
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.float_tensors import FLOAT_DTYPES, read_array, to_float32
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.safetensors_file import TensorInfo

Shapes = Mapping[str, tuple[int, ...]]


def check_heads(
    place: Path, found: Mapping[str, TensorInfo], expected: Shapes, spec: DecoderSpec
) -> dict[str, TensorInfo]:
    """Those of ``found`` that are expected. Raises ModelError, naming tensors that are missing or
    of another size than is right for the model of ``spec``."""
    faults = [
        f"{name} is {_shown(found.get(name))}, not {list(shape)}"
        for name, shape in expected.items()
        if name not in found or found[name].shape != shape or found[name].dtype not in FLOAT_DTYPES
    ]
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ModelError(
            f"{place} doesn't fit a model of {spec.hidden_size} columns and {spec.vocab_size} "
            f"tokens: {'; '.join(faults[:3])}{more}",
            field=place.name,
        )
    return {name: found[name] for name in expected}


def read_floats(tensor: TensorInfo) -> FloatArray:
    """A copy in float32, in the tensor's shape."""
    return to_float32(read_array(tensor), tensor.dtype)


def num_weights(tensors: Mapping[str, TensorInfo]) -> int:
    """Of all matrices."""
    return sum(t.shape[0] * t.shape[1] for t in tensors.values() if len(t.shape) == 2)


def _shown(tensor: TensorInfo | None) -> str:
    return "missing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
