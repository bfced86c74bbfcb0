"""What scheduling takes of a step: microseconds of processor time, without a model.

    python -m bench.bookkeeping                     32, 64 and 256 sequences that decode
    python -m bench.bookkeeping --sequences 256 --tokens 400

The engine's scheduler, policy and block pool in the simulation of ``bench/schedule.py``: ``plan``
decides a step, ``plan ahead`` one whose tokens are still to come, ``fill`` writes it into a buffer,
``commit`` takes its tokens over; ``prefix`` finds a prompt's cached blocks.
Medians over the steps in which all sequences decode, of one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from bench.schedule import INFO, POLICIES, Simulation
from bench.step_seconds import LLAMA_160M_BF16
from bench.traces import at_once
from lmi_core import _native
from lmi_core.engine.scheduler import Scheduler
from lmi_core.engine.steps_ahead import StepsAhead

_COLUMNS = ("plan", "plan ahead", "fill", "commit")
_COSTS = LLAMA_160M_BF16.scaled(((1, 0.01), (2048, 0.01)))
"""Of steps so short that the next one is submitted ahead, however many sequences there are."""
_NUM_PROMPT = 32
_PREFIX_TOKENS = (1 << 10, 1 << 12, 1 << 14)
_ROUNDS = 50


class Times:
    """Of the calls of some methods while a step had ``num_sequences``."""

    def __init__(self, num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self.us: dict[str, list[float]] = {name: [] for name in _COLUMNS}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the scheduler's calls timed."""
        columns = {
            "plan": (Scheduler, "plan"),
            "plan ahead": (StepsAhead, "plan"),
            "fill": (StepsAhead, "fill"),
            "commit": (Scheduler, "commit"),
        }
        kept = {column: getattr(*place) for column, place in columns.items()}
        for column, method in kept.items():
            setattr(*columns[column], self._timed(column, method))
        try:
            yield
        finally:
            for column, method in kept.items():
                setattr(*columns[column], method)

    def _timed(self, column: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(scheduler: Scheduler, *args: Any) -> Any:
            begin = time.thread_time_ns()
            result = method(scheduler, *args)
            us = (time.thread_time_ns() - begin) * 1e-3
            plan = result if column.startswith("plan") else args[0]
            if plan is not None and plan.num_tokens == self.num_sequences:
                self.us[column].append(us)
            return result

        return call


def measure(num_sequences: int, num_new: int) -> dict[str, float]:
    """Medians by column, in microseconds."""
    times = Times(num_sequences)
    blocks = num_sequences * -(-(_NUM_PROMPT + num_new) // INFO.block_size)
    info = replace(INFO, max_num_seqs=num_sequences, num_blocks=2 * blocks)
    trace = at_once(num_sequences, _NUM_PROMPT, num_new)
    with times.taken():
        for runs_ahead in (False, True):
            each = replace(info, runs_ahead=runs_ahead)
            Simulation(trace, POLICIES["whole"], _COSTS, each).run()
    return {name: statistics.median(us) for name, us in times.us.items() if us}


def prefix_us(num_tokens: int) -> float:
    """Of finding and giving back all blocks of a cached prompt."""
    pool = _native.BlockPool(num_tokens // INFO.block_size, INFO.block_size, bytes(16))
    hashes = pool.hash_blocks(list(range(num_tokens)))
    blocks = pool.allocate(len(hashes))
    assert blocks is not None
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    taken = []
    for _ in range(_ROUNDS):
        begin = time.thread_time_ns()
        pool.free(pool.acquire_prefix(hashes))
        taken.append((time.thread_time_ns() - begin) * 1e-3)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 64, 256])
    parser.add_argument("--tokens", type=int, default=200, help="new ones of each sequence")
    args = parser.parse_args()
    print(f"| sequences | {' | '.join(f'{name}, us' for name in _COLUMNS)} |")
    print("|---" * (1 + len(_COLUMNS)) + "|")
    for num_sequences in args.sequences:
        figures = measure(num_sequences, args.tokens)
        cells = [f"{figures[name]:.0f}" for name in _COLUMNS]
        print(f"| {num_sequences} | {' | '.join(cells)} |", flush=True)
    for num_tokens in _PREFIX_TOKENS:
        num_blocks = num_tokens // INFO.block_size
        us = prefix_us(num_tokens)
        print(f"prefix of {num_blocks} blocks: {us:.1f} us, {1e3 * us / num_blocks:.0f} ns a block")


if __name__ == "__main__":
    main()
