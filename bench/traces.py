"""Requests as they arrive, made up for the simulator: the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of ``num_prompt`` new tokens, which is answered with ``num_new``."""

    at_s: float
    """Since the start; of a later turn since the end of the one before."""
    num_prompt: int
    num_new: int
    tenant: str = ""
    priority: int = 0
    turn_of: int | None = None
    """The arrival whose prompt and answer come first, by its index."""


Trace = list[Arrival]


def poisson(num: int, rate: float, seed: int = 0) -> Trace:
    """``rate`` requests a second, prompts of 16 to 256 tokens, answers of 16 to 128."""
    rng, now, trace = random.Random(seed), 0.0, []
    for _ in range(num):
        now += rng.expovariate(rate)
        trace.append(Arrival(now, rng.randint(16, 256), rng.randint(16, 128)))
    return trace


def bursts(num: int, rate: float, seed: int = 0, size: int = 32) -> Trace:
    """As many at the same mean rate, ``size`` of them at once."""
    rng, trace = random.Random(seed), []
    for i in range(num):
        trace.append(Arrival(i // size * size / rate, rng.randint(16, 256), rng.randint(16, 128)))
    return trace


def long_tails(num: int, rate: float, seed: int = 0) -> Trace:
    """Lengths of a Pareto distribution: most are short, and some have thousands of tokens."""
    rng, now, trace = random.Random(seed), 0.0, []
    for _ in range(num):
        now += rng.expovariate(rate)
        num_prompt = min(3000, int(24 * rng.paretovariate(1.1)))
        trace.append(Arrival(now, num_prompt, min(1000, int(16 * rng.paretovariate(1.3)))))
    return trace


def conversations(num: int, rate: float, seed: int = 0) -> Trace:
    """Four turns each, which start with all that was said before."""
    rng, now, trace = random.Random(seed), 0.0, []
    for i in range(num):
        if i % 4 == 0:
            now += rng.expovariate(rate / 4)
            trace.append(Arrival(now, rng.randint(64, 256), rng.randint(16, 96)))
        else:
            pause_s = rng.expovariate(0.5)
            answer = rng.randint(16, 96)
            trace.append(Arrival(pause_s, rng.randint(8, 64), answer, turn_of=i - 1))
    return trace


def at_once(num: int = 32, num_prompt: int = 128, num_new: int = 128) -> Trace:
    """All of them at the start."""
    return [Arrival(0.0, num_prompt, num_new) for _ in range(num)]


def backlogged(num_each: int = 40, num_tenants: int = 8, times: int = 8) -> Trace:
    """Tenants who want more than there is; the last asks ``times`` as often, and first."""
    rng = random.Random(0)
    names = [f"t{num_tenants - 1}"] * (num_each * times)
    for _ in range(num_each):
        names += [f"t{tenant}" for tenant in range(num_tenants - 1)]
    return [
        Arrival(1e-6 * i, rng.randint(32, 192), rng.randint(32, 96), name)
        for i, name in enumerate(names)
    ]


def light(seconds: float, num_tenants: int = 7, rate: float = 0.25, seed: int = 0) -> Trace:
    """Tenants of whom each asks ``rate`` times a second."""
    rng, trace = random.Random(seed), []
    for tenant in range(num_tenants):
        now = rng.expovariate(rate)
        while now < seconds:
            trace.append(Arrival(now, rng.randint(32, 192), rng.randint(32, 96), f"t{tenant}"))
            now += rng.expovariate(rate)
    return sorted(trace, key=lambda arrival: arrival.at_s)


def flood(seconds: float, rate: float = 40.0, seed: int = 1) -> Trace:
    """One who asks for several times what there is."""
    rng, now, trace = random.Random(seed), 0.0, []
    while now < seconds:
        trace.append(Arrival(now, rng.randint(32, 192), rng.randint(32, 96), "flood"))
        now += rng.expovariate(rate)
    return trace


TRACES: dict[str, Callable[[int], Trace]] = {
    "poisson": partial(poisson, rate=7.0),
    "bursts": partial(bursts, rate=7.0),
    "long tails": partial(long_tails, rate=5.0),
    "conversations": partial(conversations, rate=9.0),
}
"""Made with so many requests, at rates that a machine of ``LLAMA_160M_BF16`` can just serve."""
