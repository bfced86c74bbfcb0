"""Whether flash-attn does a model's prefills: measured on the device, not guessed."""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.step_arrays import StepArrays
from lmi_core.ops.kernels import flash, select

_log = logging.getLogger(__name__)

NUM_TOKENS = 2048
_NUM_RUNS = 5

Time = Callable[[Callable[[], object]], float]
"""Seconds that a call takes on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What an attention layer of a model looks like."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype


def prefer_flash(
    chosen: dict[str, str], device: torch.device, shape: AttentionShape, time: Time | None = None
) -> None:
    """Let flash-attn do the prefills in ``chosen`` if it is installed, covers ``shape`` and takes
    less time than what was chosen; what ``LMI_OPS`` says stays."""
    is_forced = bool(os.environ.get(select.VARIABLE, ""))
    if device.type != "cuda" or is_forced or not select.has_flash():
        return
    reason = flash.not_covered(shape.dtype, shape.cache_dtype, shape.head_dim)
    if reason:
        _log.warning("flash-attn isn't used: it has no %s", reason)
        return
    own = chosen["attention"]
    seconds = {name: _prefill_s(name, device, shape, time or _time) for name in (own, "flash")}
    chosen["attention"] = min(seconds, key=seconds.__getitem__)
    _log.info(
        "a layer's attention of %d tokens takes %s: %s does prefills",
        NUM_TOKENS,
        ", ".join(f"{1e3 * value:.3f} ms in {name}" for name, value in seconds.items()),
        chosen["attention"],
    )


@torch.inference_mode()
def _prefill_s(name: str, device: torch.device, shape: AttentionShape, time: Time) -> float:
    """The median over a few runs, after one that compiles what has to be."""
    attention = select.function("attention", name)
    step = DeviceStep.upload(
        _one_prefill(shape.block_size), block_size=shape.block_size, device=device
    )
    num_slots = -(-NUM_TOKENS // shape.block_size) * shape.block_size
    cache = torch.randn(2, num_slots, shape.num_kv_heads, shape.head_dim, device=device)
    keys, values = cache.to(shape.cache_dtype)
    q = torch.randn(NUM_TOKENS, shape.num_q_heads * shape.head_dim, device=device).to(shape.dtype)

    def run() -> None:
        attention(
            q,
            keys,
            values,
            step,
            num_q_heads=shape.num_q_heads,
            scale=shape.head_dim**-0.5,
            window=0,
            soft_cap=0.0,
        )

    run()
    return statistics.median(time(run) for _ in range(_NUM_RUNS))


def _time(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def _one_prefill(block_size: int) -> StepArrays:
    positions = np.arange(NUM_TOKENS, dtype=np.int32)
    zero, empty = np.zeros(1, np.int32), np.zeros(0, np.int32)
    return StepArrays(
        token_ids=np.zeros_like(positions),
        positions=positions,
        slots=positions,
        first_rows=zero,
        num_rows=zero + NUM_TOKENS,
        kv_lengths=zero + NUM_TOKENS,
        table_rows=zero,
        block_tables=np.arange(-(-NUM_TOKENS // block_size), dtype=np.int32)[np.newaxis],
        logit_token_rows=empty,
        sampling_rows=empty,
        target_ids=empty,
        copy_src=empty,
        copy_dst=empty,
    )
