"""What a GPU's memory is used for: measured by running the widest step, then divided."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from lmi_core.errors import InsufficientMemoryError
from lmi_core.weights.checkpoint import Checkpoint
from lmi_core.weights.quantized.checkpoint import can_be_quantized

if TYPE_CHECKING:
    from lmi_core.runners.step_memory import KvCacheSize
    from lmi_core.settings.engine_config import EngineConfig

_log = logging.getLogger(__name__)
_GIB = 2**30
_FEWEST_TOKENS = 16


class DeviceMemory(Protocol):
    """What the driver and torch's allocator say of a device."""

    @property
    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int:
        """What the driver could still give, once unused memory is returned to it."""
        ...

    def allocated_bytes(self) -> int:
        """What tensors occupy."""
        ...

    def reserved_bytes(self) -> int:
        """What the allocator keeps, tensors' and captured graphs', whatever other processes do."""
        ...

    def start_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        """The most that was taken from the driver since ``start_peak``, beyond what was then."""
        ...


class CudaMemory:
    """A CUDA device's memory, of which other processes may use a part too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reserved_bytes = 0

    @property
    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        self._settle()
        return torch.cuda.mem_get_info(self._device)[0]

    def allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def reserved_bytes(self) -> int:
        self._settle()
        return torch.cuda.memory_reserved(self._device)

    def start_peak(self) -> None:
        self._settle()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._reserved_bytes = torch.cuda.memory_reserved(self._device)

    def peak_bytes(self) -> int:
        self._synchronize()
        return torch.cuda.max_memory_reserved(self._device) - self._reserved_bytes

    def _settle(self) -> None:
        self._synchronize()
        torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        """The stream alone: a device can't be waited for while another model's steps are
        captured."""
        torch.cuda.current_stream(self._device).synchronize()


def memory_of(device: torch.device) -> DeviceMemory | None:
    """None: the host's, which is sized otherwise."""
    return CudaMemory(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Bytes; all but ``kept_bytes`` are measured, with everything in place but the KV cache."""

    weight_bytes: int
    workspace_bytes: int
    """Of the widest step, beyond the weights."""
    graph_bytes: int
    """Of all decode steps' graphs, which are captured later."""
    free_bytes: int
    total_bytes: int
    kept_bytes: int
    """Left to others: what gpu_memory_utilization leaves of the total."""

    @property
    def spare_bytes(self) -> int:
        """For the KV cache."""
        return max(0, self._most_bytes - self.kept_bytes)

    @property
    def _most_bytes(self) -> int:
        return self.free_bytes - self.workspace_bytes - self.graph_bytes

    @property
    def reason(self) -> str:
        used_bytes = self.workspace_bytes + self.graph_bytes
        return (
            f"{self.free_bytes / _GIB:.1f} GiB free on the GPU after the weights, less "
            f"{used_bytes / _GIB:.1f} GiB for steps and graphs and "
            f"{self.kept_bytes / _GIB:.1f} GiB left to others"
        )

    def check(self, config: EngineConfig, *, max_model_len: int, block_bytes: int) -> None:
        """Raise InsufficientMemoryError, with values that would work, if one sequence of
        ``max_model_len`` tokens doesn't fit, or the cache that is configured."""
        if config.kv_cache_bytes is not None:
            if config.kv_cache_bytes > self._most_bytes:
                raise InsufficientMemoryError(
                    f"kv_cache_bytes={config.kv_cache_bytes} is more than is left ({self.reason}): "
                    f"set it to at most {max(0, self._most_bytes)}",
                    field="kv_cache_bytes",
                )
            return
        num_blocks = 1 + -(
            -max_model_len // config.block_size
        )  # one is of rows that stand for none
        missing = num_blocks * block_bytes - self.spare_bytes
        if missing <= 0:
            return
        advice = [self._utilization(num_blocks * block_bytes)]
        fitting = (self.spare_bytes // block_bytes - 1) * config.block_size
        if fitting > 0:
            advice.append(f"max_model_len to at most {fitting}")
        if not any(advice):
            checkpoint = Checkpoint(config.model)
            is_smallest = config.quantize == "int4" or not can_be_quantized(checkpoint)
            advice.append("a larger GPU" if is_smallest else "quantize=int4")
        raise InsufficientMemoryError(
            f"one sequence of max_model_len={max_model_len} needs a KV cache of "
            f"{num_blocks * block_bytes / _GIB:.2f} GiB, but {self.spare_bytes / _GIB:.2f} GiB are "
            f"left ({self.reason}): set {' or '.join(filter(None, advice))}",
            field="max_model_len",
        )

    def _utilization(self, wanted_bytes: int) -> str:
        """The share of the GPU that would leave so much for the cache, if there is one."""
        kept_bytes = self._most_bytes - wanted_bytes
        if kept_bytes < 0:
            return ""
        share = math.ceil(100 * (1 - kept_bytes / self.total_bytes)) / 100
        return f"gpu_memory_utilization to at least {min(share, 1.0):.2f}"

    def no_room(self, num_bytes: int) -> InsufficientMemoryError:
        """For a cache that could not be allocated, although there seemed to be room."""
        most_bytes = min(num_bytes, max(0, self._most_bytes)) * 9 // 10
        return InsufficientMemoryError(
            f"the KV cache of {num_bytes / _GIB:.2f} GiB could not be allocated in one piece per "
            f"kind ({self.reason}): set kv_cache_bytes to at most {most_bytes}",
            field="kv_cache_bytes",
        )

    def report(self, memory: KvCacheSize) -> None:
        _log.info(
            "device memory: weights %.2f GiB, workspace %.2f GiB, graphs %.2f GiB, KV cache "
            "%.2f GiB, %d blocks (%s)",
            self.weight_bytes / _GIB,
            self.workspace_bytes / _GIB,
            self.graph_bytes / _GIB,
            memory.num_bytes / _GIB,
            memory.num_blocks,
            memory.reason,
        )


def measure(
    memory: DeviceMemory,
    *,
    others_bytes: int,
    num_tokens: int,
    usable_share: float,
    run_step: Callable[[int], None],
    measure_graphs: Callable[[], int],
    can_try_less: bool = True,
) -> MeasuredMemory:
    """Measure with the weights in place, and a KV cache of next to nothing.

    ``others_bytes`` was allocated before the weights. ``run_step`` runs the widest step of so many
    tokens; ``measure_graphs`` gives the bytes that captured graphs will take. Raises
    InsufficientMemoryError if a step of ``num_tokens`` doesn't fit; it names the most that does, of
    its halves and quarters and so on, unless that can't be tried: no rank runs a step alone.
    """
    weight_bytes = memory.allocated_bytes() - others_bytes
    memory.start_peak()
    try:
        run_step(num_tokens)
    except torch.OutOfMemoryError as error:
        advice = "lower max_num_batched_tokens, quantize the weights or use larger GPUs"
        if can_try_less:
            advice = _narrower(num_tokens, memory, run_step)
        raise InsufficientMemoryError(
            f"a step of max_num_batched_tokens={num_tokens} tokens doesn't fit into the "
            f"{memory.free_bytes() / _GIB:.1f} GiB free on the GPU after the weights: {advice}",
            field="max_num_batched_tokens",
        ) from error
    workspace_bytes = memory.peak_bytes()
    graph_bytes = measure_graphs()
    total_bytes = memory.total_bytes
    return MeasuredMemory(
        weight_bytes=weight_bytes,
        workspace_bytes=workspace_bytes,
        graph_bytes=graph_bytes,
        free_bytes=memory.free_bytes(),
        total_bytes=total_bytes,
        kept_bytes=round(total_bytes * (1 - usable_share)),
    )


def _narrower(num_tokens: int, memory: DeviceMemory, run_step: Callable[[int], None]) -> str:
    """What to do about a step that is too wide."""
    fitting = num_tokens // 2
    while fitting >= _FEWEST_TOKENS:
        memory.start_peak()
        try:
            run_step(fitting)
            break
        except torch.OutOfMemoryError:
            fitting //= 2
    if fitting >= _FEWEST_TOKENS:
        return f"set max_num_batched_tokens to at most {fitting}"
    return "quantize the weights or use a larger GPU"
