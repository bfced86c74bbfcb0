"""Requests to repeat words: pure copying, which the other tasks then build on."""

from __future__ import annotations

from random import Random

from bench.demo import words
from bench.demo.task import Task

REQUESTS = (
    "Repeat: {text}",
    "Repeat after me: {text}",
    "Say this again: {text}",
    "Copy these words: {text}",
    "Write the same words again: {text}",
)

POOLS = (
    words.CHARACTERS,
    words.PLACES,
    words.OBJECTS,
    words.COLORS,
    words.FOODS,
    words.NAMES,
    words.TRAITS,
)


def repeat_task(rng: Random) -> Task:
    """Two to twelve words in random order, one in six of them made up."""
    chosen = [
        words.coin_word(rng) if rng.random() < 1 / 6 else rng.choice(rng.choice(POOLS))
        for _ in range(rng.randint(2, 12))
    ]
    text = " ".join(chosen)
    return Task("repeat", rng.choice(REQUESTS).format(text=text), text, required=(text,))
