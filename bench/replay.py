"""A trace on the engine itself, beside what the simulator says of it.

    python -m bench.replay --trace poisson --requests 200

First the 160m model's steps are timed here and now: batches of 1, 8 and 32 that decode, prompts of
64, 128, 512 and 2048 tokens. The simulator's costs are scaled by what these take beside its table
(``bench/step_seconds.py``), and the trace is played by the simulator with them, and by the engine
in real time, in turn, ``--rounds`` times; last comes the median of the rounds' ratios. Wants a
quiet machine: what else runs takes time from the engine alone. ``--stretch 2`` has requests come at
half the rate, for a machine that is slower.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

from bench.checkpoints import checkpoint
from bench.schedule import POLICIES, Served, Simulation, show, summary
from bench.step_seconds import LLAMA_160M_BF16, Points, Work
from bench.traces import TRACES, Trace
from lmi_core.bench.offline import StepLog
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.engine_config import EngineConfig

_BATCHES, _PROMPTS = (1, 8, 32), (64, 128, 512, 2048)
_NUM_PROMPT, _NUM_NEW = 128, 64
_NUM_TIMES = 3


async def ask(
    engine: Engine, prompt: Sequence[int], num_new: int, tokens_s: list[float]
) -> list[int]:
    """The answer, and when its tokens came."""
    params = SamplingParams(max_new_tokens=num_new, ignore_eos=True, temperature=1.0, seed=0)
    ids = []
    async for event in engine.generate(tuple(prompt), params):
        tokens_s.append(time.monotonic())
        ids.append(event.token_id)
    return ids


async def factors_of(engine: Engine, log: StepLog, rng: random.Random) -> Points:
    """By rows of a step: how many times as long as the table says it takes here."""
    vocab_size = engine.info.runner.vocab_size

    def prompt(num: int) -> list[int]:
        return [rng.randrange(4, vocab_size) for _ in range(num)]

    factors = {}
    for batch in _BATCHES:
        log.steps.clear()
        await asyncio.gather(
            *(ask(engine, prompt(_NUM_PROMPT), _NUM_NEW, []) for _ in range(batch))
        )
        native_s = statistics.median(native_s for _, native_s in log.decode_steps(batch))
        table_s = LLAMA_160M_BF16.of([Work(_NUM_PROMPT + _NUM_NEW // 2, 1, True)] * batch)
        factors[batch] = native_s / table_s
    for num in _PROMPTS:
        log.steps.clear()
        for _ in range(_NUM_TIMES):
            await ask(engine, prompt(num), 1, [])
        times = [step.native_seconds for _, step in log.steps if step.num_tokens == num]
        factors[num] = statistics.median(times) / LLAMA_160M_BF16.of([Work(0, num, True)])
    return tuple(sorted(factors.items()))


async def play(engine: Engine, trace: Trace, rng: random.Random) -> list[Served]:
    """Send what comes when it comes."""
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
        answer = await ask(engine, prompt, arrival.num_new, served[i].tokens_s)
        texts[i].set_result(prompt + answer)

    await asyncio.gather(*(one(i) for i in range(len(trace))))
    return served


async def measure(options: argparse.Namespace) -> None:
    log, rng = StepLog(), random.Random(0)  # no round may find another's prefixes
    config = EngineConfig(
        model=checkpoint("160m"), dtype="bf16", kv_cache_bytes=options.kv_mb << 20
    )
    trace = [
        replace(arrival, at_s=arrival.at_s * options.stretch)
        for arrival in TRACES[options.trace](options.requests)
    ]
    ratios: dict[str, list[float]] = {}
    async with Engine(config, observer=log) as engine:
        print(" " * 24, *(f"{title:>9}" for title in summary([], 1.0)))
        for _ in range(options.rounds):
            factors = await factors_of(engine, log, rng)
            costs = LLAMA_160M_BF16.scaled(factors)
            run = Simulation(trace, POLICIES["engine"], costs, engine.info.runner)
            simulated = summary(run.run(), run.now_s)
            show(options.trace, "simulated", simulated)
            begun_s = time.monotonic()
            played = await play(engine, trace, rng)
            measured = summary(played, time.monotonic() - begun_s)
            show(options.trace, "engine", measured)
            shown = ", ".join(f"{rows}: {factor:.2f}" for rows, factor in factors)
            print(f"  steps take x{shown}; load {os.getloadavg()[0]:.1f}", flush=True)
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
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
