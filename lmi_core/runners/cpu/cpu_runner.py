"""The runner of the CPU engine: weights, KV cache and step graph on the threads of a worker, which
runners share."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, ClassVar

from lmi_core import _native
from lmi_core.models.eagle_head import EagleHead
from lmi_core.models.medusa_heads import MedusaHeads
from lmi_core.runners.cpu.core_groups import bound_to, num_own_cores, num_rank_threads, own_groups
from lmi_core.runners.cpu.cpu_model import (
    RecordedModel,
    cache_dtype,
    find_cpu_model,
    open_weights,
    smoothing_of,
)
from lmi_core.runners.cpu.draft_chains import DraftChains
from lmi_core.runners.cpu.draft_runner import CpuDraftRunner
from lmi_core.runners.cpu.eagle_runner import EagleRunner, eagle_states
from lmi_core.runners.cpu.medusa_runner import MedusaRunner
from lmi_core.runners.cpu.memory_needs import HOST_MEMORY, check_memory, memory_errors
from lmi_core.runners.cpu.rank_hosts import host_cpus
from lmi_core.runners.cpu.ranked_adapters import RankedAdapters, lora_store
from lmi_core.runners.cpu.ranked_blocks import RankedBlocks
from lmi_core.runners.runner import RunnerInfo
from lmi_core.runners.step_memory import KvCacheSize, StepMemory, StepSizes
from lmi_core.settings.engine_config import EngineConfig

if TYPE_CHECKING:
    from lmi_core.models.decoder import KeptStates
    from lmi_core.models.found_model import FoundModel
    from lmi_core.models.loader import LoadedModel
    from lmi_core.ops.cpu import NativeWeights
    from lmi_core.runners.cpu.ranks import Ranks
    from lmi_core.runners.runner import AdapterStore, BlockMemory
    from lmi_core.weights.formats import FloatArray

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]

SATURATING_TOKENS = 128
"""Linears of 64 rows reach 93 to 97 % of what those of thousands do."""


class CpuRunner:
    """Implements ``Runner`` on the CPU kernels."""

    def __init__(
        self,
        found: FoundModel,
        model: LoadedModel,
        draft: LoadedModel | None,
        memory: KvCacheSize,
        claim: object,
        packers: Sequence[NativeWeights],
        ranks: Ranks | None,
    ) -> None:
        """``model``, ``draft``: what was found, loaded; ``memory``: of its KV cache; ``claim``: who
        has claimed that; ``packers``: who packed their weights. ``ranks``: the others of those
        that compute it, of which this is rank 0: its worker computes a slice of a step, and
        samples."""
        self.memory, self._claim, self._ranks = memory, claim, ranks
        self._packed = [each.packed for each in packers if each.packed is not None]
        config, spec = found.asked, model.spec
        sizes = StepSizes.of_model(config, spec)
        shared = StepMemory.of(config, sizes, memory.num_blocks)
        self.pool, self.block_tables = shared.pool, shared.block_tables
        self.sampling, self.steps = shared.sampling, shared.steps
        self._last_step = self.steps[0]
        store = None if config.lora is None else lora_store(config, config.lora, model)
        self.adapters: AdapterStore | None = store
        if store is not None and ranks is not None:
            self.adapters = RankedAdapters(store, ranks)
        kept = None
        if isinstance(found.heads, EagleHead):
            kept = eagle_states(config, model, found.heads, memory.num_blocks)
        self._recorded = recorded = RecordedModel(
            config,
            model,
            sizes,
            num_blocks=memory.num_blocks,
            adapters=None if store is None else store.table,
            gives_rows=isinstance(found.heads, MedusaHeads),
            kept=kept,
            group=None if ranks is None else ranks.join(spec, sizes, memory.num_blocks),
        )
        self.graph, self._result = recorded.graph, recorded.result
        self.cache: BlockMemory = recorded.cache
        if ranks is not None:
            self.cache = RankedBlocks(recorded.cache, ranks)
        self._states_of = config.contrastive_states
        self._with_states: tuple[_native.Graph, _native.Handle] | None = None
        """The graph that gives hidden states, once they were wanted, and these."""
        if model.head is not None:
            self.head = model.head
        self.drafter: DraftChains | None = None
        if found.drafted_by:
            self.drafter = _drafter(found, model, draft, kept, sizes, shared)
        self._worker: _native.Worker | None = SharedWorkers.acquire(packers[0].num_threads)
        if self.drafter is not None:
            self.drafter.worker = self._worker
        self.completion_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.info = self._info(found, model, sizes)
        self._report(config)
        HOST_MEMORY.claim(claim, self.info.weight_bytes + self.info.kv_cache_bytes)
        recorded.cache.lay_pages_ahead(0)
        for each in self._packed:
            each.save()

    def _info(self, found: FoundModel, model: LoadedModel, sizes: StepSizes) -> RunnerInfo:
        assert self._worker is not None
        config, generates = found.asked, model.pooling is None
        weight_bytes = found.slicing.num_ranks * model.weights.num_bytes
        arena_bytes = self.graph.arena_bytes
        if self.drafter is not None:
            weight_bytes += self.drafter.num_bytes
            arena_bytes += self.drafter.arena_bytes
        return RunnerInfo(
            vocab_size=sizes.vocab_size,
            max_model_len=sizes.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_tokens,
            num_saturating_tokens=SATURATING_TOKENS,
            max_logit_rows=sizes.max_logit_rows,
            max_logprobs=sizes.max_logprobs,
            num_blocks=self.memory.num_blocks,
            block_size=config.block_size,
            weight_bytes=weight_bytes,
            kv_cache_bytes=self.memory.num_bytes,
            arena_bytes=arena_bytes,
            num_threads=self._worker.num_threads,
            instruction_set=config.instruction_set or _native.default_instruction_set(),
            dtype=model.dtype,
            quantize=model.quantize or "",
            kv_dtype=cache_dtype(config, model.dtype),
            runs_ahead=generates,
            counts_ahead=True,
            verifies_drafts=generates,
            draft_model=found.drafted_by,
            has_draft_heads=isinstance(found.heads, MedusaHeads),
            num_ranks=found.slicing.num_ranks,
            num_state_columns=model.spec.hidden_size if generates else 0,
            pooling=model.pooling,
            has_adapters=self.adapters is not None,
        )

    def _report(self, config: EngineConfig) -> None:
        """Say what makes it slow, and how several models divide the machine."""
        if _native.instruction_sets() == ["scalar"] and _native.unbuilt_instruction_sets():
            log.warning("kernels for this processor aren't built: `make build` adds them")
        claimed_bytes = HOST_MEMORY.others_bytes(self._claim)
        if config.num_models == 1 and not claimed_bytes:
            return
        log.info(
            "model %s: weights %.0f MiB, KV cache up to %.0f MiB (%s); other models have %.0f MiB; "
            "steps of all models run one after the other, this one's on %d threads",
            config.served_model_name,
            self.info.weight_bytes / 2**20,
            self.info.kv_cache_bytes / 2**20,
            self.memory.reason,
            claimed_bytes / 2**20,
            self.info.num_threads,
        )

    def submit(self, step: _native.Step) -> None:
        self._submit(self.graph, step)

    def _submit(self, graph: _native.Graph, step: _native.Step) -> None:
        assert self._worker is not None, "submit after close"
        self._recorded.cache.lay_pages_ahead(self.pool.num_ever_used)
        self._worker.submit(graph, step, self.completion_fd)
        self._last_step = step

    @property
    def is_lost(self) -> bool:
        return self._ranks is not None and self._ranks.is_lost

    def submit_with_states(self, step: _native.Step) -> None:
        if self._with_states is None:
            decoder = self._recorded.decoder
            record = partial(decoder.record_with_states, states=self._states_of)
            self._with_states = self._recorded.record(record)
        self._submit(self._with_states[0], step)

    def states(self, step: _native.Step) -> FloatArray:
        assert self._with_states is not None
        graph, states = self._with_states
        return graph.read(states, step.num_tokens)

    def pooled_rows(self, step: _native.Step) -> FloatArray:
        return self.graph.read(self._result, step.num_logit_rows)

    def head_rows(self, step: _native.Step) -> FloatArray:
        return self.graph.read(self._result, step.num_logit_rows)

    def submit_ahead(self, step: _native.Step, logit_rows: list[int]) -> None:
        step.follow(self._last_step, logit_rows)
        self.submit(step)

    def close(self) -> None:
        if self._worker is None:
            return
        worker, self._worker = self._worker, None
        worker.drain()
        if self.drafter is not None:
            self.drafter.close()
        if self._ranks is not None:
            self._ranks.close()
        for packed in self._packed:
            packed.close()
        SharedWorkers.release(worker)
        HOST_MEMORY.release(self._claim)
        os.close(self.completion_fd)


@dataclass(slots=True)
class _Shared:
    worker: _native.Worker
    num_users: int = 0


class SharedWorkers:
    """The workers of a process, which execute the steps of its models one after the other: one for
    each number of threads and set of cores, counted by its users; the last one to leave joins its
    threads."""

    _lock: ClassVar = threading.Lock()
    _workers: ClassVar[dict[tuple[int, frozenset[int]], _Shared]] = {}

    @classmethod
    def acquire(cls, num_threads: int) -> _native.Worker:
        """Of so many threads, on the cores that this thread may use."""
        key = num_threads, frozenset(os.sched_getaffinity(0))
        with cls._lock:
            if key not in cls._workers:
                beside = next((each.worker for each in cls._workers.values()), None)
                cls._workers[key] = _Shared(_native.Worker(num_threads, beside))
            shared = cls._workers[key]
            shared.num_users += 1
            return shared.worker

    @classmethod
    def release(cls, worker: _native.Worker) -> None:
        with cls._lock:
            [key] = (key for key, each in cls._workers.items() if each.worker is worker)
            shared = cls._workers[key]
            shared.num_users -= 1
            if shared.num_users == 0:
                del cls._workers[key]
                worker.close()

    @classmethod
    def forget(cls) -> None:
        """In a child of fork(), which has the objects but not their threads: start anew."""
        cls._lock, cls._workers = threading.Lock(), {}


os.register_at_fork(after_in_child=SharedWorkers.forget)


def _drafter(
    found: FoundModel,
    model: LoadedModel,
    draft: LoadedModel | None,
    kept: KeptStates | None,
    sizes: StepSizes,
    shared: StepMemory,
) -> DraftChains:
    """What drafts for ``model``. ``kept``, ``sizes``, ``shared``: of its steps."""
    config, heads = found.asked, found.heads
    if isinstance(heads, MedusaHeads):
        return MedusaRunner(config, model, heads, sizes, shared)
    if isinstance(heads, EagleHead):
        assert kept is not None
        return EagleRunner(config, model, heads, kept, sizes, shared)
    assert draft is not None
    return CpuDraftRunner(found.drafts[0].asked, draft, sizes, shared)


def load_cpu_runner(
    asked: EngineConfig | FoundModel,
    progress: Progress | None = None,
    on_found: Callable[[int, Sequence[int]], None] | None = None,
) -> tuple[CpuRunner, LoadedModel]:
    """Load the model's weights and build its runner; see ``load_runner``.

    Raises ModelError for files that can't be served, UserError for sizes that don't fit.
    """
    from lmi_core.models.loader import load_weights
    from lmi_core.runners.cpu.ranks import Ranks

    config = with_bound_cpus(asked if isinstance(asked, EngineConfig) else asked.asked)
    if isinstance(asked, EngineConfig):
        found = find_cpu_model(config)
    else:
        found = replace(asked, asked=config)
    models, ranks, claim = (found, *found.drafts), None, object()
    on_weights = None if progress is None else partial(progress, "weights")
    needs = HOST_MEMORY.claim_checked(claim, partial(check_memory, found))
    with ExitStack() as failed, memory_errors():
        failed.callback(HOST_MEMORY.release, claim)
        if on_found is not None:
            on_found(found.spec.vocab_size, found.config.eos_token_ids)
        with bound_to(config.bound_cpus[0]) if config.bound_cpus else nullcontext():
            smoothings = [smoothing_of(each, progress) for each in models]
            if found.slicing.num_ranks > 1:
                ranks = Ranks(config, smoothings[0])
                failed.callback(ranks.close)
            packers = [open_weights(each) for each in models]
            model, *drafts = map(load_weights, models, packers, repeat(on_weights), smoothings)
            draft = drafts[0] if drafts else None
            runner = CpuRunner(found, model, draft, needs.blocks, claim, packers, ranks)
        failed.pop_all()
    return runner, model


def with_bound_cpus(config: EngineConfig) -> EngineConfig:
    """``config`` with what its ranks are bound to, where it doesn't say, and the number of threads
    that this makes of nothing else. A process that computes its model alone has all cores."""
    cpus = config.bound_cpus
    if cpus is None and config.tensor_parallel_degree == 1:
        return config
    if cpus is None:
        degree, allowed = config.tensor_parallel_degree, host_cpus(config.job)
        cpus = own_groups(config.cpu_binding, degree, allowed=allowed)
        num_threads = config.num_threads or num_own_cores(degree, allowed=allowed)
        config = replace(config, bound_cpus=cpus, num_threads=num_threads)
    # Of threads that are bound the kernel would say that there are fewer cores.
    return replace(config, num_threads=num_rank_threads(config))


def keep_packed(found: FoundModel, progress: Progress | None = None) -> None:
    """Put a model's packed weights into the repack cache, unless they are there or have no place:
    processes that load the model afterwards share their memory. Raises as ``load_cpu_runner``."""
    from lmi_core.models.loader import load_weights

    if found.slicing.num_ranks > 1:
        return  # each rank packs its own slice
    on_weights = None if progress is None else partial(progress, "weights")
    with memory_errors():
        for each in (found, *found.drafts):
            weights = open_weights(each)
            if weights.packed is not None and not weights.packed.is_stored:
                load_weights(each, weights, on_weights, smoothing_of(each, progress))
                weights.packed.save()
                weights.packed.wait()
