"""Decode steps as captured graphs, one per number of rows and longest context, made when wanted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lmi_core.ops.device.decode_step import DecodeStep
from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.step_arrays import StepArrays

_log = logging.getLogger(__name__)
_capturing = threading.Lock()

MAX_GRAPH_ROWS = 256
FIRST_NUM_KEYS = 1024
"""Attention is captured for contexts of up to this, and of up to 4, 16, ... times as many keys."""
GRAPH_BYTES = 8 << 20
"""What the driver is assumed to keep of a graph, which no allocator counts: 32 KiB for each of some
256 kernels. By estimate, until the GPU suite has measured it."""
NUM_MISSES = 8
"""Steps that run op by op on a busy device before theirs is captured between two of them."""

Key = tuple[int, int]
"""Rows and keys."""
Replay = Callable[[], None]


class Capture(Protocol):
    """Records the kernels that ``run`` launches, having run it once; the result launches them
    again."""

    def __call__(self, run: Callable[[], None]) -> Replay: ...


class CudaCapture:
    """CUDA graphs in one memory pool, on the current stream, which must not be the default one."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        stream = torch.cuda.current_stream()
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may wait for their results meanwhile, but not begin a capture, which waits
        # for the whole device.
        with (
            _capturing,
            torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ),
        ):
            run()
        return graph.replay


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: DecodeStep
    replay: Replay


class DecodeGraphs:
    """Used by the runner's thread alone.

    The launch list is that of Python: closures over tensors, which torch, Triton and the project's
    own kernels put onto the current stream. Captured, they cost the host one call.
    """

    def __init__(
        self,
        forward: Callable[[DeviceStep], Tensor],
        capture: Capture,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        block_size: int,
        scratch_block: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._capture = capture
        self._rows = row_counts(min(max_num_seqs, MAX_GRAPH_ROWS))
        self._keys = key_counts(max_model_len)
        self._block_size, self._scratch_block = block_size, scratch_block
        self._device = device
        self._logits = torch.empty(self._rows[-1], vocab_size, device=device)
        self._graphs: dict[Key, _Graph] = {}
        self._misses: dict[Key, int] = {}
        self._is_failed = False

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def run(
        self, arrays: StepArrays, feed: Callable[[Tensor], None] | None = None
    ) -> Tensor | None:
        """The logits of a decode step, valid until the next one; None if it has no graph (yet).
        ``feed`` changes the token ids on the device first."""
        key = None if self._is_failed else self._key_of(arrays)
        if key is None:
            return None
        graph = self._graphs.get(key)
        if graph is None:
            self._misses[key] = self._misses.get(key, 0) + 1
            if self._misses[key] < NUM_MISSES:
                return None
            graph = self._make(key)
            if graph is None:
                return None
        graph.inputs.fill(arrays)
        if feed is not None:
            feed(graph.inputs.step.token_ids)
        graph.replay()
        return self._logits[: len(arrays.token_ids)]

    @property
    def has_wanted(self) -> bool:
        """Whether a step found no graph of its own."""
        return bool(self._misses)

    @torch.inference_mode()
    def capture_wanted(self) -> None:
        """Capture one graph that a step wanted, while there is nothing else to do."""
        self._make(max(self._misses, key=lambda key: self._misses[key]))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run every shape once, so that none compiles anything while it serves."""
        for num_rows in self._rows:
            for num_keys in self._keys:
                self._forward(self._inputs((num_rows, num_keys)).step)

    @torch.inference_mode()
    def measure(self, reserved_bytes: Callable[[], int]) -> int:
        """Bytes that all graphs will take, by capturing two: the largest, whose values the others'
        take the place of, and the smallest, as which the others count."""
        largest, smallest = (self._rows[-1], self._keys[-1]), (self._rows[0], self._keys[0])
        reserved = [reserved_bytes()]
        for key in (largest, smallest):
            self._make(key)
            reserved.append(reserved_bytes())
        self._graphs.clear()
        return bytes_of_all(reserved, len(self._rows) * len(self._keys))

    def _make(self, key: Key) -> _Graph | None:
        self._misses.pop(key, None)
        inputs = self._inputs(key)

        def run() -> None:
            self._logits[: inputs.num_rows].copy_(self._forward(inputs.step))

        try:
            graph = _Graph(inputs, self._capture(run))
        except RuntimeError as error:
            self._is_failed = True
            self._misses.clear()
            _log.warning("decode steps run op by op: capturing them failed: %s", error)
            return None
        self._graphs[key] = graph
        _log.debug("captured decode steps of %d rows over up to %d keys", *key)
        return graph

    def _inputs(self, key: Key) -> DecodeStep:
        return DecodeStep(
            *key,
            block_size=self._block_size,
            scratch_block=self._scratch_block,
            device=self._device,
        )

    def _key_of(self, arrays: StepArrays) -> Key | None:
        num_rows = len(arrays.token_ids)
        is_decode = len(arrays.num_rows) == len(arrays.logit_token_rows) == num_rows > 0
        if not is_decode or len(arrays.copy_src) or num_rows > self._rows[-1]:
            return None
        longest = int(arrays.kv_lengths.max())
        return (
            next(count for count in self._rows if count >= num_rows),
            next(count for count in self._keys if count >= longest),
        )


def bytes_of_all(reserved_bytes: list[int], num_graphs: int) -> int:
    """What all graphs take, by what the allocator kept before and after capturing the largest and
    then the smallest, and GRAPH_BYTES for each."""
    first, second, third = reserved_bytes
    return (second - first) + (num_graphs - 1) * (third - second) + num_graphs * GRAPH_BYTES


def row_counts(most: int) -> list[int]:
    """Rows that graphs are captured for: little is wasted on free rows."""

    def steps() -> Iterator[int]:
        count = 1
        while count < most:
            yield count
            count += count if count < 8 else 8 if count < 64 else 32
        yield most

    return list(steps())


def key_counts(most: int) -> list[int]:
    counts = [FIRST_NUM_KEYS]
    while counts[-1] < most:
        counts.append(4 * counts[-1])
    return [*counts[:-1], most]
