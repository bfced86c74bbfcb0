"""Models of sizes and formats that the CPU engine takes, and what each rank of one has: packed
weights, a step graph, and the KV cache that it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lmi_core import _native
from lmi_core.errors import UserError
from lmi_core.models.eagle_head import EagleHead
from lmi_core.models.found_model import FoundModel, find_model
from lmi_core.models.kv_scales import LayerScales
from lmi_core.models.spec import DecoderSpec
from lmi_core.settings.engine_config import BLOCK_MULTIPLE, EngineConfig
from lmi_core.weights.formats import WeightFormat

if TYPE_CHECKING:
    from lmi_core.models.decoder import KeptStates
    from lmi_core.models.loader import LoadedModel
    from lmi_core.models.smoothing import Smoothing
    from lmi_core.ops.cpu import NativeWeights
    from lmi_core.ops.graph import Graph, Handle
    from lmi_core.ops.operands import LoraTable
    from lmi_core.runners.step_memory import StepSizes

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


class RecordedModel:
    """``group``: of the ranks that compute the model; None: this is all of it. ``gives_rows``: of
    ``Decoder.record_with_rows``. ``kept``: for a head that drafts."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        sizes: StepSizes,
        *,
        num_blocks: int,
        adapters: LoraTable | None = None,
        gives_rows: bool = False,
        kept: KeptStates | None = None,
        group: _native.RankGroup | None = None,
    ) -> None:
        from lmi_core.models.decoder import Decoder

        self.cache = make_cache(config, model.spec, model.dtype, num_blocks, model.kv_scales)
        self._new_graph = partial(
            _native.Graph,
            max_tokens=sizes.max_num_tokens,
            max_seqs=config.max_num_seqs,
            max_logit_rows=sizes.max_logit_rows,
            max_blocks_per_seq=sizes.max_blocks_per_seq,
            block_size=config.block_size,
            act_dtype=model.dtype,
            instruction_set=config.instruction_set,
        )
        self._dtype = model.dtype
        self._group = group
        self.decoder = Decoder(
            model.spec,
            model.weights,
            self.cache,
            sizes.max_model_len,
            adapters,
            model.slicing,
            kept,
        )
        record = self.decoder.record_with_rows if gives_rows else self.decoder.record
        self.graph, self.result = self.record(record)

    def record(self, record: Callable[[Graph], Handle]) -> tuple[_native.Graph, _native.Handle]:
        """Another graph over the same weights and cache, and what ``record`` returns of it."""
        from lmi_core.ops.cpu import lower
        from lmi_core.ops.graph import Graph

        target = self._new_graph()
        if self._group is not None:
            target.join(self._group)
        graph = Graph(self._dtype)
        result = record(graph)
        handle = lower(graph, target)[result]
        target.finish()
        return target, handle


def smoothing_of(
    found: FoundModel, progress: Callable[[str, int, int], None] | None
) -> Smoothing | None:
    """As ``smoothing_for``, which is imported only where SmoothQuant is asked for."""
    if found.quantize != "smoothquant":
        return None
    from lmi_core.calibration.peaks import smoothing_for

    return smoothing_for(found, progress)


def open_weights(found: FoundModel) -> NativeWeights:
    """What maps and packs the weights of a rank, and finds those that were packed before."""
    from lmi_core.ops.cpu import NativeWeights
    from lmi_core.weights.packed_model import open_packed_model
    from lmi_core.weights.repack_cache import MIN_CHECKPOINT_BYTES

    config, checkpoint, packed = found.asked, found.checkpoint, None
    # Who loads several ranks has told each of them.
    num_threads = config.num_threads or _native.num_physical_cores()
    if checkpoint.stored_bytes >= MIN_CHECKPOINT_BYTES:
        packed = open_packed_model(config, checkpoint, num_threads, rank=found.slicing.rank)
    return NativeWeights(
        config.instruction_set, num_threads, packed, config.activations, config.packs_behind
    )


def open_group(
    config: EngineConfig,
    sizes: StepSizes,
    spec: DecoderSpec | None = None,
    rank: int = 0,
    descriptor: int = -1,
) -> _native.RankGroup:
    """The memory of a model's ranks, as one of them maps it; ``descriptor``: rank 0's. Without
    ``spec`` they find steps there, and meet elsewhere."""
    return _native.RankGroup(
        num_ranks=config.tensor_parallel_degree,
        rank=rank,
        descriptor=descriptor,
        max_tokens=sizes.max_num_tokens,
        max_seqs=config.max_num_seqs,
        max_logit_rows=sizes.max_logit_rows,
        max_blocks_per_seq=sizes.max_blocks_per_seq,
        block_size=config.block_size,
        num_columns=0 if spec is None else spec.hidden_size,
        vocab_size=spec.vocab_size if spec is not None and spec.has_head else 0,
    )
