"""What the max-sparsity rule makes of mixed requests, beside batches that have no padding.

    python -m bench.padding --shape 160m --dtype bf16
    python -m bench.padding --sparsities 0.33 --lengths end now
    python -m bench.padding --plot padding.svg

Requests whose prompts and answers have all lengths, more than run at once, are served in padded
batches by Transformers, for each ``max_sparsity``, and by the lmi engine, in turn, round by round.
``padding`` is the share of the keys that calls read which belong to no token; ``calls`` are those
of a step; ``moved`` says how often a sequence's cache was copied into another batch; ``tok/s`` are
generated ones, medians of the rounds (lowest to highest), and ``tok/CPU s`` those of a second of
the process' time, which with ``--threads 1`` tells something on a busy machine, too. ``now``:
sequences are grouped by the lengths that they have, not by those that they will have in the end.
``--plot`` draws padding, calls and tokens a second over ``max_sparsity``, with the engine that has
no padding as a broken line.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.checkpoints import SHAPES, checkpoint
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.engine_config import EngineConfig

_COUNTS: Counter[str] = Counter()
_LONG = {"bf16": "bfloat16", "fp32": "float32"}

Request = tuple[tuple[int, ...], SamplingParams]


class Case(NamedTuple):
    """None: batches without padding."""

    max_sparsity: float | None
    lengths: str = "end"

    @property
    def is_drawn(self) -> bool:
        return self.max_sparsity is not None and self.lengths == "end"

    def __str__(self) -> str:
        if self.max_sparsity is None:
            return "no padding"
        return f"{self.max_sparsity:g}" + (" (now)" if self.lengths == "now" else "")


class Result(NamedTuple):
    seconds: float
    cpu_seconds: float
    counts: Counter[str]
    num_steps: int


def mixed(num: int, vocab_size: int, seed: int = 0) -> list[Request]:
    """Prompts of 8 to 512 tokens and answers of 8 to 128; most are short."""
    rng = random.Random(seed)
    requests = []
    for _ in range(num):
        num_prompt = round(8 * 64 ** rng.random())
        num_new = round(8 * 16 ** rng.random())
        prompt = tuple(rng.randrange(4, vocab_size) for _ in range(num_prompt))
        requests.append((prompt, SamplingParams(max_new_tokens=num_new, ignore_eos=True)))
    return requests


def config_of(case: Case, model: Path, options: argparse.Namespace) -> EngineConfig:
    common: dict[str, Any] = {
        "model": model,
        "max_num_seqs": options.batch,
        "num_threads": options.threads,
        "enable_prefix_caching": False,
    }
    if case.max_sparsity is None:
        return EngineConfig(**common, dtype=options.dtype)
    from lmi_core.settings.transformers_config import TransformersConfig

    return TransformersConfig(
        **common,
        torch_dtype=_LONG[options.dtype],
        max_sparsity=case.max_sparsity,
        max_splits=options.splits,
    )


def watch(case: Case) -> None:
    """Count what padded batches do from now on."""
    from lmi_core.runners.transformers import transformers_runner
    from lmi_core.runners.transformers.padded_caches import Chunk, PaddedCaches, Split

    class Watched(PaddedCaches):
        def run(self, chunks: Sequence[Chunk]) -> Any:
            if case.lengths == "now":
                chunks = [chunk._replace(final_len=0) for chunk in chunks]
            return super().run(chunks)

        def _padding(self, split: Split, chunks: list[Chunk]) -> Any:
            mask, positions = super()._padding(split, chunks)
            _COUNTS["keys"] += mask.numel()
            _COUNTS["padding"] += mask.numel() - int(mask.sum())
            _COUNTS["calls"] += 1
            return mask, positions

        def _merged(self, rows: list[int], sources: list[tuple[Split, int]]) -> Split:
            _COUNTS["moved"] += len(rows)
            return super()._merged(rows, sources)

    transformers_runner.PaddedCaches = Watched  # type: ignore[misc]


async def serve(engine: Engine, requests: Sequence[Request]) -> Result:
    async def one(prompt: tuple[int, ...], params: SamplingParams) -> None:
        async for _ in engine.generate(prompt, params):
            pass

    _COUNTS.clear()
    before, start = engine.stats().totals.num_steps, time.perf_counter()
    cpu_start = time.process_time()
    await asyncio.gather(*(one(*request) for request in requests))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    num_steps = engine.stats().totals.num_steps - before
    return Result(seconds, cpu_seconds, _COUNTS.copy(), num_steps)


class Summary(NamedTuple):
    padding: float
    calls: float
    moved: int
    cpu_rate: float
    rates: list[float]

    @classmethod
    def of(cls, results: Sequence[Result], num_tokens: int) -> Summary:
        counts, num_steps = results[-1].counts, results[-1].num_steps
        return cls(
            padding=counts["padding"] / max(1, counts["keys"]),
            calls=counts["calls"] / num_steps if counts["calls"] else 1.0,
            moved=counts["moved"],
            cpu_rate=statistics.median(num_tokens / result.cpu_seconds for result in results),
            rates=[num_tokens / result.seconds for result in results],
        )


def show(case: Case, summary: Summary) -> None:
    rates = summary.rates
    print(
        f"{case!s:>12} {summary.padding:9.1%} {summary.calls:7.2f} {summary.moved:7} "
        f"{summary.cpu_rate:10.1f} {statistics.median(rates):8.1f} "
        f"({min(rates):.1f} to {max(rates):.1f})",
        flush=True,
    )


def plot(summaries: Mapping[Case, Summary]) -> str:
    """An SVG picture of three panels, each from 0 to its greatest value."""
    drawn = sorted((case.max_sparsity, each) for case, each in summaries.items() if case.is_drawn)
    without = summaries[Case(None)]
    panels = (
        ("padding, % of keys read", lambda each: 100 * each.padding),
        ("groups: calls a step", lambda each: each.calls),
        ("tokens per second of the processor", lambda each: each.cpu_rate),
    )
    body = "".join(
        _panel(60 + 300 * i, title, [(x, value(each)) for x, each in drawn], value(without))
        for i, (title, value) in enumerate(panels)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="900" height="260" fill="none" '
        'font-family="sans-serif" font-size="12"><style>text { fill: #444 }</style>'
        f'<rect width="100%" height="100%" fill="white"/>{body}'
        '<text x="60" y="252">max_sparsity; broken: the lmi engine, without padding</text></svg>\n'
    )


def _panel(left: int, title: str, points: Sequence[tuple[float, float]], without: float) -> str:
    most = max(without, *(value for _, value in points)) or 1.0

    def y(value: float) -> float:
        return 210 - 170 * value / most

    line = " ".join(f"{left + 200 * x:.1f},{y(value):.1f}" for x, value in points)
    parts = [
        f'<text x="{left}" y="22">{title}</text>',
        f'<path d="M{left} 40V210H{left + 210}" stroke="#8b949e"/>',
        f'<path d="M{left} {y(without):.1f}h210" stroke="#d1690a" stroke-dasharray="5 4"/>',
        f'<polyline points="{line}" stroke="#1f6feb" stroke-width="2"/>',
    ]
    for value in {0.0, most, without}:
        label = f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
        parts.append(label)
    for x, value in points:
        at = left + 200 * x
        parts.append(f'<circle cx="{at:.1f}" cy="{y(value):.1f}" r="3.5" fill="#1f6feb"/>')
        parts.append(f'<text x="{at:.1f}" y="228" text-anchor="middle">{x:g}</text>')
    return "".join(parts)


async def measure(options: argparse.Namespace) -> None:
    model = checkpoint(options.shape)
    requests = mixed(options.requests, SHAPES[options.shape].vocab_size)
    num_tokens = sum(params.max_new_tokens or 0 for _, params in requests)
    cases = [Case(None)]
    cases += [Case(sparsity, way) for sparsity in options.sparsities for way in options.lengths]
    results: dict[Case, list[Result]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for case in cases:
            if case.max_sparsity is not None:
                watch(case)
            async with Engine(config_of(case, model, options)) as engine:
                await serve(engine, requests[:2])
                results[case].append(await serve(engine, requests))
    titles = ("padding", 9), ("calls", 7), ("moved", 7), ("tok/CPU s", 10), ("tok/s", 8)
    print(f"{'max_sparsity':>12}", *(f"{title:>{width}}" for title, width in titles))
    summaries = {case: Summary.of(results[case], num_tokens) for case in cases}
    for case, summary in summaries.items():
        show(case, summary)
    if options.plot is not None:
        options.plot.write_text(plot(summaries))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="160m")
    parser.add_argument("--dtype", choices=sorted(_LONG), default="bf16")
    parser.add_argument("--sparsities", type=float, nargs="*", default=[0, 0.1, 0.2, 0.33, 0.5, 1])
    parser.add_argument("--lengths", nargs="*", choices=("end", "now"), default=["end"])
    parser.add_argument("--splits", type=int, default=16, help="most batches of a step")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--plot", type=Path, help="an SVG picture of the table")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
