"""Prefill and decode speed of an engine in this process, beside the machine's roof of the minute.

A roof is measured before and after each round, and a share is the ratio to their mean.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lmi_core.bench.figures import Figure
from lmi_core.bench.rooflines import ELEMENT_BYTES, RoofShape, decode_roof_s, prefill_roof_s
from lmi_core.bench.roofs import Roofs, measure_roofs
from lmi_core.engine.engine import Engine
from lmi_core.engine.stats import NullObserver, StepRecord
from lmi_core.errors import UserError

NUM_PROMPT, NUM_NEW = 128, 128
"""Of decoding; a roof counts the context in the middle."""


class StepLog(NullObserver):
    """Remembers when each step ended and how long the worker took for it."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, StepRecord]] = []

    def on_step(self, step: StepRecord) -> None:
        self.steps.append((time.perf_counter(), step))

    def decode_steps(self, batch: int) -> Iterator[tuple[float, float]]:
        """(interval, native time) of steps that follow one of the same ``batch`` decode rows."""

        def is_whole(step: StepRecord) -> bool:
            return step.num_tokens == step.num_seqs == batch  # prompts fill steps, too

        for (before, first), (after, second) in itertools.pairwise(self.steps):
            if is_whole(first) and is_whole(second):
                yield after - before, second.native_seconds


@dataclass(frozen=True, slots=True)
class OfflineBench:
    """``engine`` reports its steps to ``log``; ``dtype`` is one of ELEMENT_BYTES, or there are no
    roofs."""

    shape: RoofShape
    dtype: str
    engine: Engine
    log: StepLog

    async def generate(self, num_prompt: int, num_new: int, seed: int, adapter: str = "") -> None:
        rng = random.Random(seed)
        vocab_size = self.shape.vocab_size
        least = min(300, vocab_size // 2)
        prompt = [rng.randrange(least, vocab_size) for _ in range(num_prompt)]
        events = self.engine.generate(
            prompt, max_new_tokens=num_new, ignore_eos=True, adapter=adapter
        )
        async for _ in events:
            pass

    async def prefill(self, num_tokens: int, rounds: int) -> Figure:
        figure = Figure(f"prefill {num_tokens}", "tokens/s", [])
        for i in range(rounds):
            before = self._roofs()
            start = time.perf_counter()
            await self.generate(num_tokens, 1, seed=1000 * num_tokens + i)
            seconds = time.perf_counter() - start
            figure.values.append(num_tokens / seconds)
            for roofs in self._with_after(before):
                roof_s = statistics.mean(
                    prefill_roof_s(self.shape, self.dtype, num_tokens, each) for each in roofs
                )
                figure.shares.append(roof_s / seconds)
        return figure

    async def decode(self, batch: int, rounds: int, adapter: str = "") -> tuple[Figure, float]:
        """The figure, and what the engine adds to the kernels, as a share of a step: (step interval
        - native time) / step interval. UserError where no step had the whole batch."""
        figure = Figure(f"decode batch {batch}" + (" LoRA" if adapter else ""), "tokens/s", [])
        gaps = []
        for i in range(rounds):
            self.log.steps.clear()
            before = self._roofs()
            await asyncio.gather(
                *(self.generate(NUM_PROMPT, NUM_NEW, 10**6 * i + n, adapter) for n in range(batch))
            )
            steps = list(self.log.decode_steps(batch))
            if not steps:
                raise UserError(
                    f"no step had a batch of {batch} that only decodes: the first texts end before "
                    "the last prompts are read, or drafts are in the steps; choose a smaller batch"
                )
            interval = statistics.median(interval for interval, _ in steps)
            figure.values.append(batch / interval)
            gaps.append(1 - sum(native for _, native in steps) / sum(t for t, _ in steps))
            context = NUM_PROMPT + NUM_NEW / 2
            for roofs in self._with_after(before):
                roof_s = statistics.mean(
                    decode_roof_s(self.shape, self.dtype, batch, context, each) for each in roofs
                )
                figure.shares.append(roof_s / interval)
        return figure, statistics.median(gaps)

    def _roofs(self) -> Roofs | None:
        runner = self.engine.info.runner
        has_roof = self.dtype in ELEMENT_BYTES and runner.device == "cpu"
        return measure_roofs(runner.num_threads) if has_roof else None

    def _with_after(self, before: Roofs | None) -> list[tuple[Roofs, Roofs]]:
        """The roofs around a round, if there are any."""
        if before is None:
            return []
        after = self._roofs()
        assert after is not None
        return [(before, after)]
