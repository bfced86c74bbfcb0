"""Sampling alone: microseconds per row and bytes of logits per second.

    python -m bench.kernels.sample --threads 1 --vocab 151936

Times are of the fastest of many repetitions.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from lmi_core import _native

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, 20 logprobs": {"num_logprobs": 20},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "top-k 50": {"temperature": 0.7, "top_k": 50},
    "top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "top-p 0.95, hot": {"temperature": 3.0, "top_p": 0.95},
    "min-p 0.05": {"temperature": 0.7, "min_p": 0.05},
    "typical-p 0.95": {"temperature": 0.7, "typical_p": 0.95},
    "typical-p 0.95, hot": {"temperature": 3.0, "typical_p": 0.95},
    "all filters": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "penalties": {
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "seen": [(token_id, 1) for token_id in range(1000)],
    },
}


def measure(
    level: str, row: dict[str, Any], num_rows: int, vocab_size: int, num_threads: int, repeats: int
) -> float:
    """Seconds of the fastest repetition."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((num_rows, vocab_size), np.float32) * 2.5
    logits[:, :: vocab_size // 7] += 8  # a few likely tokens, as a model has them
    runner = _native.paged_kernels.Runner(
        level, num_threads=num_threads, stride=0, num_repeats=repeats
    )
    runner.sample(
        logits,
        _native.paged_kernels.SamplingRows([{"seed": 1, **row}], vocab_size),
        sampling_rows=np.zeros(num_rows),
        positions=np.arange(num_rows),
        target_ids=np.full(num_rows, -1),
        max_logprobs=20,
    )
    seconds: float = runner.seconds
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instruction-set", default=_native.instruction_sets()[-1])
    parser.add_argument("--threads", type=int, default=_native.num_physical_cores())
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    print(
        f"sample, {args.instruction_set}, {args.rows} rows of {args.vocab}, {args.threads} threads"
    )
    print("settings               us/row     GB/s")
    for name, row in SETTINGS.items():
        seconds = measure(
            args.instruction_set, row, args.rows, args.vocab, args.threads, args.repeats
        )
        gigabytes = args.rows * args.vocab * 4 / 1e9
        print(f"{name:20} {seconds / args.rows * 1e6:8.1f} {gigabytes / seconds:8.1f}", flush=True)


if __name__ == "__main__":
    main()
