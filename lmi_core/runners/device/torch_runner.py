"""The runner of a torch device: a step graph of torch calls, run op by op or captured."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmi_core import _native
from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.pending_results import PendingResults, PendingRows
from lmi_core.ops.device.sampling_inputs import SamplingInputs
from lmi_core.ops.device.step_arrays import StepArrays
from lmi_core.ops.kernels import select
from lmi_core.runners.cpu.ranked_adapters import RankedAdapters
from lmi_core.runners.device.decode_graphs import Capture, CudaCapture, DecodeGraphs
from lmi_core.runners.device.device_cache import DeviceCache
from lmi_core.runners.device.device_memory import MeasuredMemory, measure, memory_of
from lmi_core.runners.device.draft_runner import SubmittedChain, TorchDraftRunner, take_tokens
from lmi_core.runners.device.drafting import Drafting
from lmi_core.runners.device.recorded import adapter_store, chosen_for, record_eager
from lmi_core.runners.device.widest_step import widest_arrays, widest_sampling
from lmi_core.runners.step_memory import StepMemory, StepSizes

if TYPE_CHECKING:
    from lmi_core.models.loader import LoadedModel
    from lmi_core.ops.device.eager import EagerGraph
    from lmi_core.runners.device.device_ranks import DeviceRanks
    from lmi_core.runners.runner import AdapterStore
    from lmi_core.settings.engine_config import EngineConfig
    from lmi_core.weights.formats import FloatArray

_log = logging.getLogger(__name__)

IDLE_S = 0.05
"""Without a step for so long, graphs are captured."""


class _Submitted(NamedTuple):
    """A submitted step; ``logit_rows``: of the step before, where its token ids come from.
    ``is_over`` is set once the step buffer has the results."""

    step: _native.Step
    arrays: StepArrays
    logit_rows: list[int] | None
    submitted_ns: int
    is_over: threading.Event
    wants_states: bool = False


class _Launched(NamedTuple):
    work: _Submitted
    results: PendingResults | PendingRows | None
    """None: the step failed."""
    states: PendingRows | None
    started_ns: int


class TorchRunner:
    """Implements ``AheadRunner`` on a torch device: one thread launches, another reads results."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        device: torch.device,
        chosen: Mapping[str, str],
        others_bytes: int = 0,
        ranks: DeviceRanks | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        """``chosen``: the implementation of every op. ``others_bytes``: what was allocated on the
        device before the weights. ``ranks``: the others that compute ``model``, of which this is
        rank 0. ``drafting``: what drafts for it."""
        cache = DeviceCache(config, model, device, () if drafting is None else drafting.stores)
        self.device, sizes = device, cache.sizes
        drafted_with = chosen
        chosen = chosen_for(model, config, cache, device, chosen)
        if config.deterministic:
            _log.info("deterministic: %s", select.describe(chosen))
        store = adapter_store(config, model, device)
        self.adapters: AdapterStore | None = store
        if store is not None and ranks is not None:
            self.adapters = RankedAdapters(store, ranks)
        lora = None if store is None else store.table
        self._pools = model.pooling is not None
        if model.head is not None:
            self.head = model.head
        self._ranks, group = ranks, None if ranks is None else ranks.meet(device, chosen)
        kept = None if drafting is None else drafting.kept
        record = partial(record_eager, model, chosen, cache, device, lora, group, kept)
        self._graph = record()
        self._record_with_states = partial(record, config.contrastive_states)
        self._with_states: EagerGraph | None = None
        """The graph that gives hidden states, once they were wanted."""
        draft_graphs = [] if drafting is None else drafting.graphs(drafted_with)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        measured = self._measure(config, sizes, others_bytes)
        memory = cache.grow(measured, None if ranks is None else ranks.agree)
        if ranks is not None:
            ranks.join()
        self._graphs = self._make_graphs(config, sizes, memory.num_blocks)
        shared = StepMemory.of(config, sizes, memory.num_blocks)
        self.pool, self.block_tables = shared.pool, shared.block_tables
        self.sampling, self.steps = shared.sampling, shared.steps
        info = cache.info(memory, measured, chosen, runs_ahead=ranks is None)
        self.info = replace(
            info,
            has_adapters=self.adapters is not None,
            counts_ahead=True,
            num_state_columns=0 if self._pools else model.spec.hidden_size,
        )
        self._work: queue.SimpleQueue[_Submitted | SubmittedChain | None] = queue.SimpleQueue()
        self.drafter: TorchDraftRunner | None = None
        if drafting is not None:
            self.info = drafting.added_to(self.info)
            self.drafter = TorchDraftRunner(drafting, draft_graphs, sizes, shared, self._work.put)
        share = config.gpu_memory_utilization
        self._oom_advice = f"lower gpu_memory_utilization, which is {share}"
        self.completion_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sampled: Tensor | None = None
        self._last: _Submitted | None = None
        self._rows = np.zeros((0, model.spec.hidden_size), np.float32)
        """What the last step that was read gave beside tokens, or in their place."""
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._launch_all, name="lmi-torch-launcher", daemon=True),
            threading.Thread(target=self._read_all, name="lmi-torch-reader", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _measure(
        self, config: EngineConfig, sizes: StepSizes, others_bytes: int
    ) -> MeasuredMemory | None:
        """Run the widest step and the graphs' kernels, over a cache of one block."""
        memory = memory_of(self.device)
        if memory is None:
            return None
        kernels = self._graph.kernels

        def run_step(num_tokens: int) -> None:
            arrays = widest_arrays(
                1 if kernels.is_row_by_row else num_tokens,
                sizes,
                max_num_seqs=config.max_num_seqs,
                block_size=config.block_size,
                has_long_prefills=kernels.chosen["attention"] in ("torch", "flash"),
            )
            step = DeviceStep.upload(arrays, block_size=config.block_size, device=self.device)
            result = self._forward_first(arrays, step)
            if not self._pools:
                sampling = widest_sampling(sizes.max_logit_rows, sizes.max_logprobs)
                self._graph.choose(result, sampling).wait()

        graphs = self._make_graphs(config, sizes, 0)

        def measure_graphs() -> int:
            return 0 if graphs is None else graphs.measure(memory.reserved_bytes)

        if self._stream is not None:
            # Weights come from another stream.
            torch.cuda.current_stream(self.device).synchronize()
        with torch.cuda.stream(self._stream):  # None changes nothing
            if graphs is not None:
                graphs.warm_up()
            return measure(
                memory,
                others_bytes=others_bytes,
                num_tokens=sizes.max_num_tokens,
                usable_share=config.gpu_memory_utilization,
                run_step=run_step,
                measure_graphs=measure_graphs,
                can_try_less=self._ranks is None,
            )

    def _forward_first(self, arrays: StepArrays, step: DeviceStep) -> Tensor:
        """While ranks load."""
        if self._ranks is None:
            return self._graph.forward(step)
        try:
            with self._ranks.explained():
                self._ranks.begin(arrays)
                return self._graph.forward(step)
        except BaseException as error:
            self._ranks.lose(f"rank 0 failed: {error}")
            raise

    def _make_graphs(
        self, config: EngineConfig, sizes: StepSizes, scratch_block: int
    ) -> DecodeGraphs | None:
        capture = make_capture(config, self.device, self._graph.kernels.chosen)
        if self._pools or self._ranks is not None:  # nothing decodes; others can't follow
            return None
        if capture is not None and self._graph.reads_counts:
            _log.warning("decode steps run op by op: the host counts the rows of experts")
            return None
        if capture is None:
            return None
        return DecodeGraphs(
            self._graph.forward,
            capture,
            max_num_seqs=config.max_num_seqs,
            max_model_len=sizes.max_model_len,
            vocab_size=sizes.vocab_size,
            block_size=config.block_size,
            scratch_block=scratch_block,
            device=self.device,
        )

    def submit(self, step: _native.Step) -> None:
        self._submit(step, None)

    def submit_ahead(self, step: _native.Step, logit_rows: list[int]) -> None:
        self._submit(step, logit_rows)

    def submit_with_states(self, step: _native.Step) -> None:
        self._submit(step, None, wants_states=True)

    def _submit(
        self, step: _native.Step, logit_rows: list[int] | None, *, wants_states: bool = False
    ) -> None:
        assert self._threads, "submit after close"
        # A copy: the loop may append to block tables while the step is in flight.
        arrays = StepArrays.of(step, self.block_tables)
        at_ns, is_over = time.monotonic_ns(), threading.Event()
        self._work.put(_Submitted(step, arrays, logit_rows, at_ns, is_over, wants_states))

    @property
    def is_lost(self) -> bool:
        return self._ranks is not None and self._ranks.is_lost

    def pooled_rows(self, step: _native.Step) -> FloatArray:
        return self._rows

    def states(self, step: _native.Step) -> FloatArray:
        return self._rows

    def head_rows(self, step: _native.Step) -> None:
        """Heads find states in their slots."""

    def close(self) -> None:
        if not self._threads:
            return
        self._work.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self._ranks is not None:
            self._ranks.close()
        if self.drafter is not None:
            self.drafter.close()
        os.close(self.completion_fd)
        self._sampled = self._last = None
        del self._graph, self._graphs, self._with_states, self._record_with_states, self.drafter
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _launch_all(self) -> None:
        """The launcher's thread: puts steps onto the stream while earlier ones may still run."""
        with torch.cuda.stream(self._stream):  # None changes nothing
            while (work := self._next()) is not None:
                if isinstance(work, SubmittedChain):
                    assert self.drafter is not None
                    self.drafter.run(work)
                    continue
                started_ns = time.monotonic_ns()
                results = states = None
                has_begun = False
                try:
                    graph = self._graph_of(work)
                    has_begun = True
                    results, states = self._launch(work, graph)
                except torch.OutOfMemoryError as error:
                    work.step.error = f"{error} ({self._oom_advice})"
                except Exception as error:
                    work.step.error = f"{type(error).__name__}: {error}"
                if results is None and has_begun and self._ranks is not None:
                    self._ranks.lose(f"rank 0 failed: {work.step.error}")
                self._sampled, self._last = getattr(results, "token_ids", None), work
                self._launched.put(_Launched(work, results, states, started_ns))
        self._launched.put(None)

    def _read_all(self) -> None:
        """The reader's thread: waits for results and hands them out."""
        finished_ns = 0
        while (launched := self._launched.get()) is not None:
            step = launched.work.step
            try:
                if isinstance(launched.results, PendingRows):
                    self._rows = launched.results.wait()
                elif launched.results is not None:
                    launched.results.wait().write(step)
                if launched.states is not None:
                    self._rows = launched.states.wait()
                if self._ranks is not None and launched.results is not None:
                    self._ranks.check()  # an abort leaves results, too
            except Exception as error:
                step.error = f"{type(error).__name__}: {error}"
            started_ns = max(launched.started_ns, finished_ns)
            finished_ns = time.monotonic_ns()
            times = {"started_ns": started_ns, "finished_ns": finished_ns}
            step.set_times(submitted_ns=launched.work.submitted_ns, **times)
            launched.work.is_over.set()
            os.eventfd_write(self.completion_fd, 1)

    def _next(self) -> _Submitted | SubmittedChain | None:
        """Wait for a step, or a chain; capture graphs meanwhile."""
        while self._graphs is not None and self._graphs.has_wanted:
            try:
                return self._work.get(timeout=IDLE_S)
            except queue.Empty:
                self._graphs.capture_wanted()
        return self._work.get()

    def _graph_of(self, work: _Submitted) -> EagerGraph:
        """What computes the step; recording it may fail, which no other rank sees."""
        if not work.wants_states:
            return self._graph
        if self._with_states is None:
            self._with_states = self._record_with_states()
        return self._with_states

    def _launch(
        self, work: _Submitted, graph: EagerGraph
    ) -> tuple[PendingResults | PendingRows, PendingRows | None]:
        if self.drafter is not None:
            take_tokens(work.step, work.arrays)
        if self._ranks is not None:
            self._ranks.begin(work.arrays)
        if self._pools:
            return PendingRows(graph.forward(self._upload(work.arrays))), None
        if work.wants_states:
            result, states, *_ = graph.forward_all(self._upload(work.arrays))
            return graph.choose(result, self._sampling_of(work)), PendingRows(states)
        feed = None if work.logit_rows is None else partial(self._feed, work.logit_rows)
        logits = None
        if self._graphs is not None and not len(work.arrays.adapter_slots):
            logits = self._graphs.run(work.arrays, feed)
        if logits is None:
            inputs = self._upload(work.arrays)
            if feed is not None:
                feed(inputs.token_ids)
            logits = graph.forward(inputs)
        return graph.choose(logits, self._sampling_of(work)), None

    def _sampling_of(self, work: _Submitted) -> SamplingInputs:
        """Behind the forward pass: penalties wait for the tokens of the step before it."""
        if work.step.counted_rows and self._last is not None and work.logit_rows is not None:
            self._last.is_over.wait()
            work.step.follow(self._last.step, work.logit_rows)
            work.step.take_tokens()
        return SamplingInputs.of(work.step, self.sampling, self.info.max_logprobs)

    def _upload(self, arrays: StepArrays) -> DeviceStep:
        return DeviceStep.upload(arrays, block_size=self.info.block_size, device=self.device)

    def _feed(self, logit_rows: list[int], token_ids: Tensor) -> None:
        """Take the token ids from the last step's results, which the host may not know yet, if it
        has any. Nobody wants this step's where the last one failed, or nothing was sampled."""
        if self._sampled is None or max(logit_rows) < 0:
            return
        count = len(logit_rows)
        sampled = self._sampled[:count]
        if logit_rows != list(range(count)):
            rows = torch.tensor(logit_rows).to(self.device, non_blocking=True)
            sampled = torch.where(rows < 0, token_ids[:count], self._sampled[rows.clamp(min=0)])
        token_ids[:count].copy_(sampled.clamp(min=0))


def make_capture(
    config: EngineConfig, device: torch.device, chosen: Mapping[str, str]
) -> Capture | None:
    """What captures decode steps; None if they run op by op."""
    if device.type != "cuda" or config.enforce_eager:
        return None
    if chosen["attention"] in ("torch", "by row"):
        _log.warning("decode steps run op by op: torch's attention can't be captured")
        return None
    return CudaCapture()
