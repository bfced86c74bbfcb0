"""A model as a step list that C++ launches, with its KV cache: all of it, or a rank's part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lmi_core import _native
from lmi_core.ops.device.product_lowering import NotNativeError
from lmi_core.ops.device.rank_lowering import RankLowering
from lmi_core.ops.device.recorded_steps import RecordedSteps
from lmi_core.ops.device.step_list import StepListSizes
from lmi_core.ops.device.step_lowering import StepLowering
from lmi_core.ops.graph import Graph
from lmi_core.ops.kernels.cuda import attention_lists
from lmi_core.ops.kernels.cuda.sampling import MAX_TOP
from lmi_core.runners.device import decode_graphs
from lmi_core.runners.device.decode_graphs import key_counts, row_counts
from lmi_core.runners.device.device_cache import DeviceCache
from lmi_core.runners.device.device_memory import DeviceMemory, MeasuredMemory, measure, memory_of
from lmi_core.runners.device.recorded import adapter_store
from lmi_core.runners.device.widest_step import fill_widest
from lmi_core.runners.step_memory import KvCacheSize, StepMemory

if TYPE_CHECKING:
    from lmi_core.models.loader import LoadedModel
    from lmi_core.settings.engine_config import EngineConfig


class CudaModel:
    """``steps``, ``memory`` and ``measured`` are there once it has started."""

    steps: RecordedSteps
    memory: KvCacheSize
    measured: MeasuredMemory | None

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        device: torch.device,
        chosen: Mapping[str, str],
    ) -> None:
        """``chosen``: the implementation of every op. Raises NotNativeError if an op of the model
        has no native kernel, having changed nothing."""
        from lmi_core.models.decoder import record

        if config.max_logprobs > MAX_TOP:
            reason = f"the CUDA kernel has no more than {MAX_TOP} log-probabilities a token"
            raise NotNativeError("sample", reason)
        self.cache = DeviceCache(config, model, device)
        self.sizes = self.cache.sizes
        self.device, self._config, self._ranks = device, config, 0
        graph = Graph(model.dtype)
        self.adapters = adapter_store(config, model, device)
        """None: no adapters were asked for."""
        table = None if self.adapters is None else self.adapters.table
        record(model, graph, self.cache.store, self.sizes.max_model_len, table)
        self._lowered = _lowered(graph, model, device, chosen)

    def start(
        self,
        others_bytes: int = 0,
        ranks: int = 0,
        agree: Callable[[int], int] | None = None,
    ) -> None:
        """Measure and divide the memory, and make the list. ``others_bytes``: what was allocated on
        the device before the weights. ``ranks``: the address of those that do the same now;
        ``agree``: of ``DeviceCache.grow``."""
        self._ranks = ranks
        self.measured = self._measure(others_bytes)
        self.memory = self.cache.grow(self.measured, agree)
        self.steps = self._build(self.sizes.max_num_tokens, self.memory.num_blocks)
        self._synchronize()  # the weights come from another stream

    def close(self) -> None:
        """No step may be in flight."""
        self.steps.close()
        del self._lowered
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _build(
        self, num_tokens: int, scratch_block: int, *, is_captured: bool = True
    ) -> RecordedSteps:
        config, sizes = self._config, self.sizes
        num_graph_rows = min(config.max_num_seqs, num_tokens, decode_graphs.MAX_GRAPH_ROWS)
        is_captured = is_captured and not config.enforce_eager
        return self._lowered.build(
            StepListSizes(
                max_tokens=num_tokens,
                max_seqs=config.max_num_seqs,
                max_logit_rows=sizes.max_logit_rows,
                max_copies=config.max_num_seqs,
                max_blocks_per_seq=sizes.max_blocks_per_seq,
                block_size=config.block_size,
                max_top=sizes.max_logprobs,
                num_attention_slots=attention_lists.num_slots(self.device),
                split_tokens=attention_lists.SPLIT_TOKENS,
                scratch_block=scratch_block,
                num_misses=decode_graphs.NUM_MISSES,
                row_counts=row_counts(num_graph_rows) if is_captured else (),
                key_counts=key_counts(sizes.max_model_len) if is_captured else (),
            ),
            self._ranks,
        )

    def _measure(self, others_bytes: int) -> MeasuredMemory | None:
        """Run the widest step and capture graphs, over a cache of one block."""
        memory = memory_of(self.device)
        if memory is None:
            return None
        self._synchronize()

        def run_step(num_tokens: int) -> None:
            # The step's worker knows of no ranks: it mustn't capture what they would do together.
            with closing(self._build(num_tokens, 0, is_captured=False)) as steps:
                self._run_widest(steps, num_tokens)

        return measure(
            memory,
            others_bytes=others_bytes,
            num_tokens=self.sizes.max_num_tokens,
            usable_share=self._config.gpu_memory_utilization,
            run_step=run_step,
            measure_graphs=lambda: self._measure_graphs(memory),
            can_try_less=self._ranks == 0,
        )

    def _run_widest(self, steps: RecordedSteps, num_tokens: int) -> None:
        shared = StepMemory.of(self._config, self.sizes, 1)
        fill_widest(shared, num_tokens, self.sizes, self._config)
        worker = start_worker(steps)
        try:
            worker.run(shared.steps[0])
        finally:
            worker.close()

    def _measure_graphs(self, memory: DeviceMemory) -> int:
        """Bytes that all graphs will take, by capturing the largest and the smallest."""
        if self._config.enforce_eager:
            return 0
        with closing(self._build(self.sizes.max_num_tokens, 0)) as steps:
            steps.list.warm_up()
            num_rows, num_keys = steps.list.num_shapes
            reserved_bytes = [memory.reserved_bytes()]
            for shape in ((num_rows - 1, num_keys - 1), (0, 0)):
                steps.list.capture(*shape)
                reserved_bytes.append(memory.reserved_bytes())
        # Those of steps with adapters have about twice the kernels.
        num_graphs = num_rows * num_keys * (1 if self.adapters is None else 3)
        return decode_graphs.bytes_of_all(reserved_bytes, num_graphs)


def start_worker(
    steps: RecordedSteps, group: _native.RankGroup | None = None
) -> _native.DeviceWorker:
    """``group``: of the ranks of which this is the first."""
    return _native.DeviceWorker(str(steps.list.library.path), steps.list.address, group)


def _lowered(
    graph: Graph, model: LoadedModel, device: torch.device, chosen: Mapping[str, str]
) -> StepLowering:
    slicing, size = model.slicing, model.spec.vocab_size
    if slicing.num_ranks == 1:
        return StepLowering(graph, chosen, device)
    ends = [replace(slicing, rank=rank).vocabulary(size)[1] for rank in range(slicing.num_ranks)]
    return RankLowering(graph, chosen, device, slicing.rank, [0, *ends])
