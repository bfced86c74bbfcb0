"""What a GGUF file says of rotary positions, as ``config.json`` says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lmi_core.errors import ModelError
from lmi_core.weights.float_tensors import to_float32
from lmi_core.weights.gguf.file import fault
from lmi_core.weights.gguf.metadata import Metadata
from lmi_core.weights.safetensors_file import TensorInfo

_ORIGINAL = "original_max_position_embeddings"
_SCALINGS = ("none", "linear", "yarn")


def rotary(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or (config["hidden_size"] // heads if heads else 0)
    settings: dict[str, Any] = {}
    if (rotated := metadata.number("rope.dimension_count")) and head_dim:
        settings["partial_rotary_factor"] = rotated / head_dim
    if (scaling := scaling_of(metadata, config)) is not None:
        settings["rope_scaling"] = scaling
        if (original := scaling.get(_ORIGINAL)) is not None:
            settings[_ORIGINAL] = int(original)  # Phi-3 has it here
    return settings


def scaling_of(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    original = metadata.number("rope.scaling.original_context_length")
    factor = metadata.number("rope.scaling.factor")
    linear = metadata.number("rope.scale_linear")
    long, short = (
        _numbers(metadata, name)
        for name in ("rope_factors_long.weight", "rope_factors_short.weight")
    )
    if (freqs := _numbers(metadata, "rope_freqs.weight")) is not None:
        # Frequencies of Llama 3 are divided by numbers that the file lists.
        return {
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": 1.0,
            "short_factor": freqs,
            "long_factor": freqs,
        }
    if long is not None and short is not None:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": metadata.number("rope.scaling.attn_factor") or 1.0,
            _ORIGINAL: original or config["max_position_embeddings"],
        }
    kind = str(metadata.get("rope.scaling.type") or ("linear" if linear else "none"))
    factor = factor or linear
    if kind not in _SCALINGS:
        raise ModelError(
            f"{metadata.file.path} has {metadata.architecture}.rope.scaling.type {kind[:40]!r}; "
            f"{', '.join(_SCALINGS)} are supported",
            field=metadata.file.path.name,
        )
    if kind == "none" or not factor:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if original:
            scaling[_ORIGINAL] = original
        for name in ("beta_fast", "beta_slow"):
            if (value := metadata.number(f"rope.scaling.yarn_{name}")) is not None:
                scaling[name] = value
    return scaling


def _numbers(metadata: Metadata, name: str) -> list[float] | None:
    tensor = metadata.file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.num_bytes > 1 << 16:
        raise fault(metadata.file.path, f"has {name} as {tensor.dtype} {[*tensor.shape]}")
    return _read(tensor)


def _read(tensor: TensorInfo) -> list[float]:
    values = np.fromfile(tensor.path, np.float32, tensor.num_bytes // 4, offset=tensor.offset)
    return [float(value) for value in to_float32(values, tensor.dtype)]
