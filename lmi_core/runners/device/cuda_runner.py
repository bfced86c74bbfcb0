"""The runner of native CUDA kernels: C++ threads launch a recorded step list."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING

import torch

from lmi_core import _native
from lmi_core.ops.device.adapter_table import AdapterTable
from lmi_core.ops.device.product_lowering import NotNativeError
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
from lmi_core.runners.device.widest_step import fill_widest
from lmi_core.runners.step_memory import StepMemory

if TYPE_CHECKING:
    from lmi_core.models.loader import LoadedModel
    from lmi_core.settings.engine_config import EngineConfig

_log = logging.getLogger(__name__)


class CudaRunner:
    """Implements ``AheadRunner``: no Python runs in a step."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        device: torch.device,
        chosen: Mapping[str, str],
        others_bytes: int = 0,
    ) -> None:
        """``chosen``: the implementation of every op. ``others_bytes``: what was allocated on the
        device before the weights. Raises NotNativeError if an op of the model has no native kernel,
        having changed nothing."""
        from lmi_core.models.decoder import record

        if config.max_logprobs > MAX_TOP:
            reason = f"the CUDA kernel has no more than {MAX_TOP} log-probabilities a token"
            raise NotNativeError("sample", reason)
        cache = DeviceCache(config, model, device)
        self._config, self._sizes = config, cache.sizes
        self.device = device
        graph = Graph(model.dtype)
        adapters = None if config.lora is None else AdapterTable()
        record(model, graph, cache.store, cache.sizes.max_model_len, adapters)
        self._lowered = StepLowering(graph, chosen, device)
        measured = self._measure(others_bytes)
        memory = cache.grow(measured)
        self._steps = self._build(cache.sizes.max_num_tokens, memory.num_blocks)
        self._synchronize()  # the weights come from another stream
        shared = StepMemory.of(config, cache.sizes, memory.num_blocks)
        self.pool, self.block_tables = shared.pool, shared.block_tables
        self.sampling, self.steps = shared.sampling, shared.steps
        self._last_step = self.steps[0]
        self.info = cache.info(memory, measured, chosen)
        self.completion_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._worker: _native.DeviceWorker | None = self._start(self._steps)
        self._has_warned = False

    def submit(self, step: _native.Step) -> None:
        assert self._worker is not None, "submit after close"
        self._worker.submit(step, self.completion_fd)
        self._last_step = step
        self._steps.list.library.log_notices()
        if not self._has_warned and self._worker.capture_error:
            self._has_warned = True
            _log.warning(
                "decode steps run kernel by kernel: capturing them failed: %s",
                self._worker.capture_error,
            )

    def submit_ahead(self, step: _native.Step, logit_rows: list[int]) -> None:
        step.follow(self._last_step, logit_rows)
        self.submit(step)

    def close(self) -> None:
        if self._worker is None:
            return
        self._worker.close()
        self._worker = None
        self._steps.close()
        os.close(self.completion_fd)
        del self._lowered
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @staticmethod
    def _start(steps: RecordedSteps) -> _native.DeviceWorker:
        return _native.DeviceWorker(str(steps.list.library.path), steps.list.address)

    def _build(self, num_tokens: int, scratch_block: int) -> RecordedSteps:
        config, sizes = self._config, self._sizes
        num_graph_rows = min(config.max_num_seqs, num_tokens, decode_graphs.MAX_GRAPH_ROWS)
        is_captured = not config.enforce_eager
        return self._lowered.build(
            StepListSizes(
                max_tokens=num_tokens,
                max_seqs=config.max_num_seqs,
                max_logit_rows=sizes.max_logit_rows,
                max_copies=config.max_num_seqs,
                max_blocks_per_seq=sizes.max_blocks_per_seq,
                block_size=config.block_size,
                max_top=config.max_logprobs,
                num_attention_slots=attention_lists.num_slots(self.device),
                split_tokens=attention_lists.SPLIT_TOKENS,
                scratch_block=scratch_block,
                num_misses=decode_graphs.NUM_MISSES,
                row_counts=row_counts(num_graph_rows) if is_captured else (),
                key_counts=key_counts(sizes.max_model_len) if is_captured else (),
            )
        )

    def _measure(self, others_bytes: int) -> MeasuredMemory | None:
        """Run the widest step and capture graphs, over a cache of one block."""
        memory = memory_of(self.device)
        if memory is None:
            return None
        self._synchronize()

        def run_step(num_tokens: int) -> None:
            with closing(self._build(num_tokens, 0)) as steps:
                self._run_widest(steps, num_tokens)

        return measure(
            memory,
            others_bytes=others_bytes,
            num_tokens=self._sizes.max_num_tokens,
            usable_share=self._config.gpu_memory_utilization,
            run_step=run_step,
            measure_graphs=lambda: self._measure_graphs(memory),
        )

    def _run_widest(self, steps: RecordedSteps, num_tokens: int) -> None:
        shared = StepMemory.of(self._config, self._sizes, 1)
        fill_widest(shared, num_tokens, self._sizes, self._config)
        worker = self._start(steps)
        try:
            worker.run(shared.steps[0])
        finally:
            worker.close()

    def _measure_graphs(self, memory: DeviceMemory) -> int:
        """Bytes that all graphs will take, by capturing the largest and the smallest."""
        if self._config.enforce_eager:
            return 0
        with closing(self._build(self._sizes.max_num_tokens, 0)) as steps:
            steps.list.warm_up()
            num_rows, num_keys = steps.list.num_shapes
            reserved_bytes = [memory.reserved_bytes()]
            for shape in ((num_rows - 1, num_keys - 1), (0, 0)):
                steps.list.capture(*shape)
                reserved_bytes.append(memory.reserved_bytes())
        return decode_graphs.bytes_of_all(reserved_bytes, num_rows * num_keys)
