"""A trace on the engine itself, beside what the simulator says of it.

    python -m bench.replay --trace poisson --requests 200
    python -m bench.replay --fairness

In turn, ``--rounds`` times, the 160m model's steps are timed, the trace is played by the engine in
real time, and the steps are timed once more: batches of 1 to 32 that decode, prompts of 48 to 2048
tokens (the median, and how single steps differ from it), and prompts beside texts, of which what
such a step takes beside the sum of its parts, and what passes until the next one, which needs its
tokens. The simulator's costs are scaled by what
these take beside its table (``bench/step_seconds.py``), by the mean of before and behind, and the
simulator plays the trace with them; last comes the median of the rounds' ratios. Requests come at
nearly the rate that the machine of the table can serve, where a tenth more of a step's time doubles
the wait for a first token: on a machine that is slower take ``--stretch 1.5``, which has them come
at two thirds of the rate. Wants a quiet machine: what else runs takes time from the engine alone.
With ``--fairness`` tenants share the engine, which simulates nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from uuid import uuid4

from bench.checkpoints import SHAPES, checkpoint
from bench.schedule import POLICIES, Served, Simulation, jain, show, summary
from bench.step_seconds import LLAMA_160M_BF16, Points, StepSeconds, Work
from bench.traces import TRACES, Trace, backlogged, flood, light
from lmi_core.bench.offline import StepLog
from lmi_core.engine.engine import Engine
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.engine_config import EngineConfig

_BATCHES, _PROMPTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32), (48, 64, 128, 512, 2048)
_NUM_PROMPT, _NUM_NEW = 128, 64
_NUM_TIMES = 3
_NUM_BESIDE, _NUM_TURNS = 8, 12
"""Texts that decode, and prompts that come beside them one after the other."""


async def ask(
    engine: Engine, prompt: Sequence[int], num_new: int, tokens_s: list[float], tenant: str = ""
) -> list[int]:
    """The answer, and when its tokens came."""
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True, temperature=1.0, seed=0)
    request = GenerationRequest(
        request_id=uuid4().hex, prompt_token_ids=tuple(prompt), params=params, tenant=tenant
    )
    ids = []
    async for event in engine.generate(request):
        tokens_s.append(time.monotonic())
        ids.append(event.token_id)
    return ids


async def factors_of(
    engine: Engine, log: StepLog, rng: random.Random
) -> tuple[Points, list[float]]:
    """By rows of a step: how many times as long as the table says it takes here, in the median; and
    how many times as long as that single decode steps took."""
    vocab_size = engine.info.runner.vocab_size

    def prompt(num: int) -> list[int]:
        return [rng.randrange(4, vocab_size) for _ in range(num)]

    factors, spread = {}, []
    for batch in _BATCHES:
        log.steps.clear()
        await asyncio.gather(
            *(ask(engine, prompt(_NUM_PROMPT), _NUM_NEW, []) for _ in range(batch))
        )
        all_s = [native_s for _, native_s in log.decode_steps(batch)]
        native_s = statistics.median(all_s)
        spread += [each_s / native_s for each_s in all_s]
        table_s = LLAMA_160M_BF16.of([Work(_NUM_PROMPT + _NUM_NEW // 2, 1, True)] * batch)
        factors[batch] = native_s / table_s
    for num in _PROMPTS:
        log.steps.clear()
        for _ in range(_NUM_TIMES):
            await ask(engine, prompt(num), 1, [])
        times = [step.native_seconds for _, step in log.steps if step.num_tokens == num]
        factors[num] = statistics.median(times) / LLAMA_160M_BF16.of([Work(0, num, True)])
    return tuple(sorted(factors.items())), spread


async def beside_prompts(
    engine: Engine, log: StepLog, rng: random.Random, costs: StepSeconds
) -> tuple[float, float]:
    """Where texts decode beside prompts: seconds from the end of a step to the start of one that
    needs its tokens, and how many times as long as ``costs`` say such a step takes."""
    vocab_size = engine.info.runner.vocab_size

    def prompt() -> list[int]:
        return [rng.randrange(4, vocab_size) for _ in range(_NUM_PROMPT)]

    async def come() -> None:
        for _ in range(_NUM_TURNS):
            await ask(engine, prompt(), 3, [])

    log.steps.clear()
    texts = (ask(engine, prompt(), 4 * _NUM_TURNS, []) for _ in range(_NUM_BESIDE))
    await asyncio.gather(come(), *texts)
    gaps = [
        after - before - step.native_seconds
        for (before, _), (after, step) in itertools.pairwise(log.steps)
        if step.num_tokens > step.num_seqs > 1
    ]
    mixed = []
    for _, step in log.steps:
        num_texts = step.num_seqs - 1
        if step.num_tokens > step.num_seqs > 1:
            texts_work = [Work(_NUM_PROMPT + 2 * _NUM_TURNS, 1, True)] * num_texts
            works = [*texts_work, Work(0, step.num_tokens - num_texts, True)]
            mixed.append(step.native_seconds / costs.of(works))
    return max(0.0, statistics.median(gaps)), statistics.median(mixed)


class Timed(NamedTuple):
    """What steps take here."""

    factors: Points
    spread: list[float]
    gap_s: float
    mixed: float


async def costs_of(engine: Engine, log: StepLog, rng: random.Random) -> Timed:
    factors, spread = await factors_of(engine, log, rng)
    scaled = LLAMA_160M_BF16.scaled(factors)
    return Timed(factors, spread, *await beside_prompts(engine, log, rng, scaled))


async def play(
    engine: Engine, trace: Trace, rng: random.Random, seconds: float | None = None
) -> list[Served]:
    """Send what comes when it comes; what is open after ``seconds`` is aborted."""
    info = engine.info.runner
    begun_s = time.monotonic()
    texts = [asyncio.get_running_loop().create_future() for _ in trace]
    served = [Served(arrival, 0.0) for arrival in trace]
    own = [[rng.randrange(info.vocab_size) for _ in range(each.num_prompt)] for each in trace]

    async def one(i: int) -> None:
        arrival, before = trace[i], []
        if arrival.turn_of is not None:
            before = await texts[arrival.turn_of]
        since_s = time.monotonic() if before else begun_s
        await asyncio.sleep(since_s + arrival.at_s - time.monotonic())
        prompt = (before + own[i])[: info.max_model_len - arrival.num_new]
        served[i].since_s = time.monotonic()
        answer = await ask(engine, prompt, arrival.num_new, served[i].tokens_s, trace[i].tenant)
        texts[i].set_result(prompt + answer)

    tasks = [asyncio.create_task(one(i)) for i in range(len(trace))]
    done, late = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in done:
        task.result()
    return served


async def measure_fairness(options: argparse.Namespace) -> None:
    """Tenants as ``bench.schedule --fairness`` has them: eight who want more than there is, and
    seven light ones by turns alone and beside a flood."""
    rng, seconds = random.Random(0), options.seconds
    async with Engine(replace(config_of(options), max_queue_size=1 << 20)) as engine:
        await ask(engine, range(4, 132), 64, [])
        tokens: Counter[str] = Counter()
        for each in await play(engine, backlogged(), rng, seconds):
            tokens[each.arrival.tenant] += len(each.tokens_s)
        print(f"backlogged: Jain's index {jain(tokens.values()):.3f} of {tokens.total()} tokens")
        rate = 0.25 / options.stretch
        few, many = light(seconds, rate=rate), flood(seconds, rate=40.0 / options.stretch)
        print(" " * 24, *(f"{title:>9}" for title in summary([], 1.0)))
        for _ in range(options.rounds):
            for name, trace in (("light alone", few), ("beside a flood", few + many)):
                served = await play(engine, trace, rng, seconds)
                own = [each for each in served if each.arrival.tenant != "flood"]
                show(name, "engine", summary(own, seconds))
                print(f"  {sum(len(each.tokens_s) for each in own)} tokens of light tenants")
        print(f"load {os.getloadavg()[0]:.1f}")


def config_of(options: argparse.Namespace) -> EngineConfig:
    num_bytes = options.kv_mb << 20
    return EngineConfig(model=checkpoint(options.shape), dtype="bf16", kv_cache_bytes=num_bytes)


async def measure(options: argparse.Namespace) -> None:
    log, rng = StepLog(), random.Random(0)  # no round may find another's prefixes
    trace = [
        replace(arrival, at_s=arrival.at_s * options.stretch)
        for arrival in TRACES[options.trace](options.requests)
    ]
    ratios: dict[str, list[float]] = {}
    async with Engine(config_of(options), observer=log) as engine:
        print(" " * 24, *(f"{title:>9}" for title in summary([], 1.0)))
        for _ in range(options.rounds):
            timed = [await costs_of(engine, log, rng)]
            begun_s = time.monotonic()
            played = await play(engine, trace, rng)
            measured = summary(played, time.monotonic() - begun_s)
            show(options.trace, "engine", measured)
            timed.append(await costs_of(engine, log, rng))
            factors = tuple(
                (rows, (before + behind) / 2)
                for (rows, before), (_, behind) in zip(*(t.factors for t in timed), strict=True)
            )
            gap_s = statistics.mean(each.gap_s for each in timed)
            mixed = statistics.mean(each.mixed for each in timed)
            spread = tuple(itertools.chain.from_iterable(each.spread for each in timed))
            costs = replace(
                LLAMA_160M_BF16.scaled(factors), gap_s=gap_s, mixed=mixed, spread=spread
            )
            run = Simulation(trace, POLICIES["engine"], costs, engine.info.runner)
            simulated = summary(run.run(), run.now_s)
            show(options.trace, "simulated", simulated)
            shown = ", ".join(f"{rows}: {factor:.2f}" for rows, factor in factors)
            load = os.getloadavg()[0]
            print(
                f"  steps take x{shown}; gap {1e3 * gap_s:.1f} ms; prompts beside "
                f"texts x{mixed:.2f}; load {load:.1f}",
                flush=True,
            )
            for name, value in measured.items():
                ratios.setdefault(name, []).append(
                    value / simulated[name] if simulated[name] else 1.0
                )
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    print("engine / simulated      ", *(f"{value:9.2f}" for value in medians.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", choices=tuple(TRACES), default="poisson")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stretch", type=float, default=1.0)
    parser.add_argument("--kv-mb", type=int, default=2048)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="160m", help="with --fairness")
    parser.add_argument("--fairness", action="store_true", help="tenants instead of a trace")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part of --fairness")
    options = parser.parse_args()
    asyncio.run(measure_fairness(options) if options.fairness else measure(options))


if __name__ == "__main__":
    main()
