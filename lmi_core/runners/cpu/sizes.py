"""Sizes and formats that the CPU engine takes, and models that have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lmi_core import _native
from lmi_core.errors import UserError
from lmi_core.models.eagle_head import EagleHead
from lmi_core.models.found_model import FoundModel, find_model
from lmi_core.models.kv_scales import LayerScales
from lmi_core.models.spec import DecoderSpec
from lmi_core.settings.engine_config import BLOCK_MULTIPLE, EngineConfig
from lmi_core.weights.formats import WeightFormat

CacheDType = Literal["fp32", "bf16", "int8", "fp8_e4m3fn", "fp8_e5m2"]
_NATIVE_DTYPES: dict[CacheDType, str] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "int8": "int8",
    "fp8_e4m3fn": "e4m3",
    "fp8_e5m2": "e5m2",
}
_SCRATCH_FLOATS = (4 << 20) // 4
_TILE_ROWS, _PARTITION, _LANES = 48, 256, 16
"""Of csrc/cpu: kScratchBytes, a thread's; kQueryTileRows, kAttentionPartition and kLanes."""


def find_cpu_model(asked: EngineConfig) -> FoundModel:
    """What will be loaded, as far as settings and headers tell whether it can be, but for memory
    (``memory_needs.py``): what explains, serves and manages models asks here. Raises as
    ``load_cpu_runner``."""
    check_sizes(asked)
    found = find_model(asked)
    check_heads(found)
    return found


def make_cache(
    config: EngineConfig,
    spec: DecoderSpec,
    dtype: WeightFormat,
    num_blocks: int,
    scales: Sequence[LayerScales] = (),
) -> _native.KvCache:
    """The KV blocks of a model, or of what drafts for one; ``dtype``: of its activations.
    ``scales``: of its layers in fp8, which other dtypes don't take, nor layers that have one cache
    in common; none: 1."""
    is_in_fp8 = cache_dtype(config, dtype).startswith("fp8")
    has_scales = is_in_fp8 and len(scales) == spec.num_cache_layers
    return _native.KvCache(
        num_blocks=num_blocks,
        fixed_scales=[scale for layer in scales for scale in layer] if has_scales else [],
        **_cache_layout(config, spec, dtype),
    )


def block_bytes(config: EngineConfig, spec: DecoderSpec, dtype: WeightFormat) -> int:
    """Of one of the blocks of ``make_cache``, in all layers."""
    return _native.KvCache.block_bytes(**_cache_layout(config, spec, dtype))


def _cache_layout(config: EngineConfig, spec: DecoderSpec, dtype: WeightFormat) -> dict[str, Any]:
    return {
        "block_size": config.block_size,
        "num_kv_heads": spec.attention.num_kv_heads,
        "head_dim": spec.attention.head_dim,
        "dtype": _NATIVE_DTYPES[cache_dtype(config, dtype)],
        "is_latent": spec.attention.latent is not None,
        "num_layers": spec.num_cache_layers,
    }


def check_sizes(config: EngineConfig) -> None:
    """Raise UserError for a size that the native code can't count or hold."""
    for name, value, low, high in (
        ("num_threads", config.num_threads, 1, 1024),
        ("max_num_seqs", config.max_num_seqs, 1, 16384),
        ("max_num_batched_tokens", config.max_num_batched_tokens, 1, 131072),
        ("block_size", config.block_size, BLOCK_MULTIPLE, 4096),
        ("kv_cache_bytes", config.kv_cache_bytes, 1, _native.cpu_info()["memory_limit_bytes"]),
    ):
        if value is not None and not low <= value <= high:
            raise UserError(f"{name} is {value}; allowed are {low} to {high}", field=name)
    check_instruction_set(config.instruction_set, f"instruction_set {config.instruction_set!r}")
    if config.block_size % BLOCK_MULTIPLE:
        raise UserError(
            f"block_size is {config.block_size}, but must be a multiple of {BLOCK_MULTIPLE}",
            field="block_size",
        )


def check_instruction_set(name: str, said: str) -> None:
    """Raise UserError, which begins with what was ``said``, for a level that can't be had."""
    levels = _native.instruction_sets()
    if not name or name in levels:
        return
    text = f"{said} is not available here; this machine and build have {', '.join(levels)}"
    if unbuilt := _native.unbuilt_instruction_sets():
        text += f" ({', '.join(unbuilt)}: not built; in the checkout, `make build` adds them)"
    raise UserError(text, field="instruction_set")


def check_heads(found: FoundModel) -> None:
    """Raise ModelError for heads that attention has no room for in a thread's scratch memory, of
    the model and of what drafts for it."""
    specs = [(each.config, each.spec) for each in (found, *found.drafts)]
    if isinstance(found.heads, EagleHead):
        specs.append((found.config, found.heads.spec))
    for config, spec in specs:
        attention = spec.attention
        num_q_heads, num_kv_heads = attention.num_q_heads, attention.num_kv_heads
        num_rows = max(_TILE_ROWS, num_q_heads // num_kv_heads, 2 * num_kv_heads) + _LANES
        # Scores and weights of a partition's keys; queries and, twice, their results; values that
        # are made of a latent cache's keys.
        num_columns = attention.head_dim + _LANES
        num_floats = num_rows * (2 * _PARTITION + 3 * num_columns)
        num_floats += _PARTITION * num_columns * (attention.latent is not None)
        if num_floats > _SCRATCH_FLOATS:
            raise config.error(
                "num_attention_heads",
                f"is {num_q_heads} over {num_kv_heads} of keys and values, of {attention.head_dim} "
                f"numbers each: attention on the CPU would want {4 * num_floats} bytes for a key "
                f"head's queries, and has {4 * _SCRATCH_FLOATS}",
            )


def cache_dtype(config: EngineConfig, model_dtype: WeightFormat) -> CacheDType:
    """The KV cache's."""
    return model_dtype if config.kv_dtype == "auto" else config.kv_dtype
