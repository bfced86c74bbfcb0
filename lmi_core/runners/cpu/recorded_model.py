"""What each rank of a model has: packed weights, a step graph, and the KV cache that it reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from lmi_core import _native
from lmi_core.runners.cpu.sizes import make_cache
from lmi_core.weights.packed_model import open_packed_model
from lmi_core.weights.repack_cache import MIN_CHECKPOINT_BYTES

if TYPE_CHECKING:
    from lmi_core.models.decoder import KeptStates
    from lmi_core.models.found_model import FoundModel
    from lmi_core.models.loader import LoadedModel
    from lmi_core.models.smoothing import Smoothing
    from lmi_core.models.spec import DecoderSpec
    from lmi_core.ops.cpu import NativeWeights
    from lmi_core.ops.graph import Graph, Handle
    from lmi_core.ops.operands import LoraTable
    from lmi_core.runners.step_memory import StepSizes
    from lmi_core.settings.engine_config import EngineConfig


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
