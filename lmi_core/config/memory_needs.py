"""What a model that is here will need of the machine's memory, from its headers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from lmi_core.config.model_config import ModelConfig
from lmi_core.errors import LmiError
from lmi_core.units import megabytes

_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 4.25 / 8}
"""Of a weight; int4 with the scale and zero point of 128 weights."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """In bytes; the activations of a step, a few MiB mostly, are not among them."""

    weight_bytes: int
    kv_cache_bytes: int
    limit_bytes: int
    """What this process may use."""
    free_bytes: int

    def describe(self) -> str:
        need = self.weight_bytes + self.kv_cache_bytes
        return (
            f"about {megabytes(need)} (weights {megabytes(self.weight_bytes)}, KV cache up to "
            f"{megabytes(self.kv_cache_bytes)}); the machine has {megabytes(self.limit_bytes)}, "
            f"{megabytes(self.free_bytes)} of it free"
        )


Needs = MemoryNeeds | str | None


def memory_needs(model: ModelConfig, directory: Path | None) -> Needs:
    """The needs of a model of the CPU engine whose files are in ``directory``, or why it can't have
    them; None where that isn't known before it is loaded."""
    if model.backend != "lmi" or directory is None or not any(directory.glob("*.safetensors")):
        return None
    if model.settings.get("device", "cpu") != "cpu":
        return None
    try:
        return _needs(model, directory)
    except LmiError as error:
        return str(error)
    except (ImportError, ValueError, TypeError, OSError):
        return None  # other checks say what is wrong


def _needs(model: ModelConfig, directory: Path) -> MemoryNeeds:
    from lmi_core import _native
    from lmi_core.models.family import text_tensors
    from lmi_core.models.registry import family_of
    from lmi_core.models.weights import expected_shapes
    from lmi_core.runners.cpu.cpu_runner import cache_dtype, plan_kv_cache
    from lmi_core.weights.checkpoint import read_checkpoint
    from lmi_core.weights.hf_config import read_hf_config

    config = model.engine_config(directory)
    hf_config = read_hf_config(directory)
    family = family_of(hf_config.architecture)
    spec = family.read_spec(family.text_config(hf_config))
    names = spec.names
    tensors = text_tensors(read_checkpoint(directory), names)
    stored = "fp32" if tensors[names.embedding].dtype == "F32" else "bf16"
    dtype = stored if config.dtype == "auto" else config.dtype
    if model.files.quantization is not None:
        weight_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    else:
        shapes = expected_shapes(spec)
        embedding = math.prod(shapes.pop(names.embedding))
        head_name = f"{names.head}.weight"
        head = embedding if spec.tied_head else math.prod(shapes.pop(head_name))
        matrices = sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
        vectors = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 1)
        copied = 0 if dtype == stored else embedding * _BYTES[dtype]
        head_bytes = 1.0 if config.quantize else _BYTES[dtype]
        weight_bytes = int(
            matrices * _BYTES[config.quantize or dtype] + head * head_bytes + 4 * vectors + copied
        )
    attention = spec.attention
    plan = plan_kv_cache(
        config,
        block_bytes=_native.KvCache.block_bytes(
            num_layers=spec.num_layers,
            block_size=config.block_size,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            dtype=cache_dtype(config, "fp32" if dtype == "fp32" else "bf16"),
        ),
        max_model_len=config.max_model_len or spec.max_positions,
    )
    limit = int(_native.cpu_info()["memory_limit_bytes"])
    return MemoryNeeds(weight_bytes, plan.num_bytes, limit, min(limit, free_bytes()))


def free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """What the system could give without swapping (proc(5), MemAvailable)."""
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return 0
