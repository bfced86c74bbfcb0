"""What the machine can do at this minute: read bandwidth and multiply-add rates.

The extension is imported by what measures: servers are watched where it isn't built, too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

READ_BYTES = 512 << 20
"""Well beyond any cache."""
LEAST_WEIGHT_BYTES = 128 << 20
"""Fewer may stay in the processor's caches, and have no roof."""


@dataclass(frozen=True, slots=True)
class Roofs:
    """Best of several repeats on ``num_threads`` threads."""

    num_threads: int
    read_gb_per_s: float
    bf16_gflops: float
    fp32_gflops: float
    int8_gops: float = 0.0


def measure_roofs(num_threads: int | None = None, instruction_set: str = "") -> Roofs:
    """Takes about a second."""
    from lmi_core import _native

    num_threads = num_threads or _native.num_physical_cores()
    level = instruction_set or _native.default_instruction_set()
    read_gb_per_s = measure_read_gb_per_s(num_threads, level)

    def gflops(dtype: str) -> float:
        seconds, operations = _native.kernels.time_multiply_add(
            level, dtype, 20_000_000, num_threads, 5
        )
        return float(operations / min(seconds) * 1e-9)

    return Roofs(num_threads, read_gb_per_s, gflops("bf16"), gflops("fp32"), gflops("int8"))


def measure_read_gb_per_s(num_threads: int, level: str) -> float:
    """Of memory, not of caches."""
    from lmi_core import _native

    read_s = min(_native.kernels.time_read(level, READ_BYTES, num_threads, 5))
    return float(READ_BYTES / read_s * 1e-9)


if __name__ == "__main__":
    print(json.dumps(asdict(measure_roofs())))
