"""Small sums: two numbers of one or two digits added up."""

from __future__ import annotations

from random import Random

from bench.demo.split import is_held_out
from bench.demo.task import Task

QUESTIONS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b} =",
    "{a} + {b}",
    "{a}+{b}=",
    "{a} + {b} = ?",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "Calculate {a} + {b}.",
    "Compute {a} + {b}.",
    "Add {a} and {b}.",
    "Please add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "Can you tell me what {a} + {b} is?",
    "what is {a} + {b}",
)

ANSWERS = ("{a} + {b} = {c}",)


SIZES = ((1, 1), (1, 2), (2, 1), (2, 2))
SIZE_SHARES = (1, 2, 2, 4)
"""Digits of the two numbers to learn from. Pairs of single digits are few: seen too often, they
would be learned by heart and the held-out ones with them not at all."""


def draw_pair(rng: Random, num_digits: int | None = None, *, held_out: bool) -> tuple[int, int]:
    """Two numbers, the larger of `num_digits` (1 or 2; None: as `SIZE_SHARES` has it)."""
    sizes = [size for size in SIZES if num_digits in (None, max(size))]
    shares = [SIZE_SHARES[SIZES.index(size)] for size in sizes]
    while True:
        size = rng.choices(sizes, shares)[0]
        a, b = (rng.randrange(10) if digits == 1 else rng.randrange(10, 100) for digits in size)
        if is_held_out("sum", a, b) == held_out:
            return a, b


def sum_task(rng: Random, num_digits: int | None = None, *, held_out: bool) -> Task:
    """A question for a sum; the answer must state the result and no other number after it."""
    a, b = draw_pair(rng, num_digits, held_out=held_out)
    fields = {"a": a, "b": b, "c": a + b}
    question, answer = (rng.choice(forms).format(**fields) for forms in (QUESTIONS, ANSWERS))
    return Task("sum", question, answer, required=(f"= {a + b}",))


def sum_list(rng: Random, *, held_out: bool) -> str:
    """A plain text of sums, one a line; some lists have each sum both ways round if both are
    on the same side of the split.
    """
    lines = []
    is_paired = rng.random() < 0.3
    for _ in range(rng.randint(6, 24)):
        a, b = draw_pair(rng, held_out=held_out)
        lines.append(f"{a} + {b} = {a + b}")
        if is_paired and is_held_out("sum", b, a) == held_out:
            lines.append(f"{b} + {a} = {a + b}")
    return "\n".join(lines)
