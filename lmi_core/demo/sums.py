"""Small sums: two numbers of one or two digits added up."""

from __future__ import annotations

from random import Random

from lmi_core.demo.split import is_held_out
from lmi_core.demo.task import Task

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


def draw_pair(rng: Random, num_digits: int, *, held_out: bool) -> tuple[int, int]:
    """Two numbers, at least one of them with `num_digits` (1 or 2) digits and none with more."""
    low, limit = (0, 10) if num_digits == 1 else (10, 100)
    while True:
        a, b = rng.randrange(low, limit), rng.randrange(low, limit)
        if num_digits == 2 and rng.random() < 0.25:
            a, b = rng.sample((a, rng.randrange(10)), 2)
        if is_held_out("sum", a, b) == held_out:
            return a, b


def sum_task(rng: Random, num_digits: int, *, held_out: bool) -> Task:
    """A question for a sum; the answer must state the result and no other number after it."""
    a, b = draw_pair(rng, num_digits, held_out=held_out)
    fields = {"a": a, "b": b, "c": a + b}
    question, answer = (rng.choice(forms).format(**fields) for forms in (QUESTIONS, ANSWERS))
    return Task(f"sum{num_digits}", question, answer, required=(f"= {a + b}",))


def sum_list(rng: Random, *, held_out: bool) -> str:
    """A plain text of sums, one a line."""
    lines = []
    for _ in range(rng.randint(6, 24)):
        a, b = draw_pair(rng, rng.choice((1, 2, 2)), held_out=held_out)
        lines.append(f"{a} + {b} = {a + b}")
    return "\n".join(lines)
