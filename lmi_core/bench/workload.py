"""What a load consists of: sessions of requests, their lengths, and when they come."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lmi_core.errors import UserError

_WORDS = (
    "the",
    "fox",
    "went",
    "to",
    "a",
    "castle",
    "by",
    "sea",
    "and",
    "told",
    "its",
    "friend",
    "about",
    "three",
    "small",
    "red",
    "boats",
)
_LONGEST = 2048


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of words, which are about as many tokens, and the tokens that it is to give."""

    words: tuple[str, ...]
    num_new: int

    @property
    def text(self) -> str:
        return " ".join(self.words)


Session = tuple[Request, ...]
"""Requests that are sent one after the other, as the steps of a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a workload; lengths are in tokens."""

    num_requests: int = 64
    num_prompt: int = 128
    num_new: int = 128
    num_shared: int = 1024
    """Of a prefix that several requests have in common (prefix), or that every step of a
    conversation begins with (agents)."""
    num_groups: int = 4
    """Different prefixes."""
    num_turns: int = 4
    """Steps of a conversation."""


def _words(rng: random.Random, count: int) -> tuple[str, ...]:
    return tuple(rng.choices(_WORDS, k=count))


def _fixed(rng: random.Random, sizes: Sizes) -> Iterator[Session]:
    for _ in range(sizes.num_requests):
        yield (Request(_words(rng, sizes.num_prompt), sizes.num_new),)


def _mix(rng: random.Random, sizes: Sizes) -> Iterator[Session]:
    """Lengths are log-normal around the sizes, as those of people's chats are: most are short, some
    are twenty times as long."""

    def length(median: int, sigma: float) -> int:
        return max(2, min(_LONGEST, round(rng.lognormvariate(math.log(median), sigma))))

    for _ in range(sizes.num_requests):
        words = _words(rng, length(sizes.num_prompt, 1.1))
        yield (Request(words, length(sizes.num_new, 0.8)),)


def _prefix(rng: random.Random, sizes: Sizes) -> Iterator[Session]:
    prefixes = [_words(rng, sizes.num_shared) for _ in range(sizes.num_groups)]
    for _ in range(sizes.num_requests):
        words = rng.choice(prefixes) + _words(rng, sizes.num_prompt)
        yield (Request(words, sizes.num_new),)


def _agents(rng: random.Random, sizes: Sizes) -> Iterator[Session]:
    """Each step's prompt is the last one's, as much text as its answer had, and something new."""
    instructions = _words(rng, sizes.num_shared)
    for _ in range(-(-sizes.num_requests // sizes.num_turns)):
        words, steps = instructions, []
        for _ in range(sizes.num_turns):
            words += _words(rng, sizes.num_prompt)
            steps.append(Request(words, sizes.num_new))
            words += _words(rng, sizes.num_new)
        yield tuple(steps)


WORKLOADS: dict[str, Callable[[random.Random, Sizes], Iterator[Session]]] = {
    "fixed": _fixed,
    "mix": _mix,
    "prefix": _prefix,
    "agents": _agents,
}
"""fixed: all lengths equal; mix: as in people's chats; prefix: shared by groups of requests;
agents: conversations that grow with every step."""


def make_sessions(name: str, sizes: Sizes, seed: int) -> list[Session]:
    """The same for the same seed."""
    return list(WORKLOADS[name](random.Random(seed), sizes))


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds at which ``count`` sessions come, ``rate`` of them a second on average.

    The times between them follow a gamma distribution of shape ``1 / burstiness``: 1 is a Poisson
    process, more comes in bursts. Raises UserError for what isn't above 0.
    """
    if rate <= 0 or burstiness <= 0:
        raise UserError("--rate and --burstiness must be above 0", field="--rate")
    rng, now, times = random.Random(seed), 0.0, []
    shape = 1 / burstiness
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(shape, burstiness / rate)
    return times
