"""What is measured: a number of requests, their lengths, and the figure that the timings give."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lmi_core.bench.stream import Timing

LETTER_OFFSET = 31
"""Letters are single tokens of the bench tokenizer, at their code point less this."""


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    kind: Literal["prefill", "decode", "serve"]
    num_requests: int
    num_prompt: int
    num_new: int
    asks_completions: bool = False
    """Our server is asked by ``/v1/completions``, as a peer's is, not by its own route."""
    num_shared: int = 0
    """Prompt tokens that all requests have in common, and that a request before them has left in
    the cache; the servers are started with their prefix caches on."""


WORKS = {
    work.name: work
    for work in (
        Work("prefill512", "prefill", 1, 512, 1),
        Work("prefill2048", "prefill", 1, 2048, 1),
        Work("decode1", "decode", 1, 128, 128),
        Work("serve8", "serve", 8, 128, 128),
        Work("serve32", "serve", 32, 128, 128),
        Work("prefix8", "serve", 8, 1056, 32, num_shared=1024),
        Work("serve64", "serve", 64, 16, 256, asks_completions=True),
    )
}
USUAL_WORKS = [name for name in WORKS if name not in ("serve64", "prefix8")]
"""serve64 is for the near-zero model: it shows what a server costs besides its model. prefix8 is
for peers whose servers cache prefixes; its figure is the time to the first token."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Prompt tokens per second of a prefill, else generated tokens per second; means over the
    requests of the time to the first token and of the time per token after it."""

    tokens_per_s: float
    first_token_ms: float | None
    per_token_ms: float | None


def make_prompts(work: Work, seed: int) -> list[list[int]]:
    """Random letters, which every server's tokenizer turns into as many tokens."""
    rng = random.Random(seed)

    def letters(count: int) -> list[int]:
        return [
            ord(letter) - LETTER_OFFSET for letter in rng.choices(string.ascii_letters, k=count)
        ]

    shared = letters(work.num_shared)
    return [
        [*shared, *letters(work.num_prompt - work.num_shared)] for _ in range(work.num_requests)
    ]


def text_of(prompt: Sequence[int]) -> str:
    return "".join(chr(token_id + LETTER_OFFSET) for token_id in prompt)


def figure_of(work: Work, timings: Sequence[Timing]) -> Figure:
    """Raises ValueError when a request gave another number of tokens than it was to give."""
    counts = [timing.num_tokens for timing in timings]
    if counts != [work.num_new] * work.num_requests:
        raise ValueError(
            f"{work.name} wants {work.num_requests} x {work.num_new} tokens, got {counts}"
        )
    per_token_s = [(last - first) / (count - 1) for first, last, count in timings if count > 1]
    first_s = sum(timing.first_s for timing in timings) / len(timings)
    if work.kind == "prefill":
        rate = work.num_prompt / timings[0].first_s
    elif work.kind == "decode":
        rate = 1 / per_token_s[0]
    else:
        rate = sum(counts) / max(timing.last_s for timing in timings)
    per_token_ms = 1e3 * sum(per_token_s) / len(per_token_s) if per_token_s else None
    return Figure(rate, 1e3 * first_s, per_token_ms)
