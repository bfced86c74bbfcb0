"""The training and held-out corpora: endless streams of documents, determined by a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from random import Random

from bench.demo import words
from bench.demo.chat import Turn, render_chat, render_text
from bench.demo.reading import reading, with_text
from bench.demo.records import record_task
from bench.demo.repeat import repeat_task
from bench.demo.story import draw_cast, story_questions, story_task, tell
from bench.demo.sums import sum_list, sum_task
from bench.demo.talk import talk_task
from bench.demo.task import Task

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a helpful assistant that gives short answers.",
    "Answer the user.",
    "You tell stories to children.",
    "Be kind and brief.",
)

FIRST_SHARES = {"story": 18, "reading": 32, "sum": 12, "json": 22, "repeat": 12, "talk": 4}
SHARES = {"story": 10, "reading": 44, "sum": 16, "json": 24, "repeat": 2, "talk": 4}
"""Kinds of requests with their relative frequencies, at first and then: stories and repeating are
learned long before the rest."""

MOST_FACTS = 6
"""Of a text to learn from; many questions about one text teach looking things up fastest."""

LONG_CHAT_WORDS = 1100
"""Enough for a long conversation to fill a window of 2048 tokens."""


def _turns(tasks: list[Task]) -> list[Turn]:
    return [
        turn
        for task in tasks
        for turn in (Turn("user", task.prompt), Turn("assistant", task.answer))
    ]


def _chat(tasks: list[Task], rng: Random) -> str:
    turns = _turns(tasks)
    if rng.random() < 0.2:
        turns.insert(0, Turn("system", rng.choice(SYSTEM_TEXTS)))
    return render_chat(turns)


def draw_task(rng: Random, *, held_out: bool, shares: Mapping[str, int] = SHARES) -> list[Task]:
    """One request, or a text with some or all of its questions in a row."""
    kind = rng.choices(tuple(shares), tuple(shares.values()))[0]
    if kind == "story":
        cast = draw_cast(rng, held_out=held_out)
        follow_ups = story_questions(cast, rng)[: rng.choice((0, 0, 1, 2))]
        return [story_task(rng, held_out=held_out, cast=cast), *follow_ups]
    if kind == "reading":
        text, tasks = reading(rng, held_out=held_out, most_facts=MOST_FACTS)
        num_tasks = len(tasks) if rng.random() < 0.5 else rng.randint(1, len(tasks))
        return [with_text(text, tasks[0], rng), *tasks[1:num_tasks]]
    if kind == "sum":
        return [sum_task(rng, held_out=held_out)]
    if kind == "json":
        return [record_task(rng, held_out=held_out)]
    return [repeat_task(rng) if kind == "repeat" else talk_task(rng)]


def short_chat(rng: Random, *, held_out: bool, shares: Mapping[str, int] = SHARES) -> str:
    """A conversation of one request, sometimes of a few."""
    num_requests = rng.choice((1, 1, 1, 2, 3))
    tasks = [draw_task(rng, held_out=held_out, shares=shares) for _ in range(num_requests)]
    return _chat([task for group in tasks for task in group], rng)


def long_chat(rng: Random, *, held_out: bool) -> str:
    """A conversation that fills a long window and looks back at its texts from far away."""
    tasks: list[Task] = []
    open_questions: list[Task] = []
    num_words = 0
    while num_words < LONG_CHAT_WORDS:
        if open_questions and rng.random() < 0.25:
            group = [open_questions.pop(rng.randrange(len(open_questions)))]
        elif rng.random() < 0.3:
            cast = draw_cast(rng, held_out=held_out)
            group = [story_task(rng, held_out=held_out, cast=cast)]
            # Questions by name stay clear however many stories come between.
            questions = story_questions(cast, rng)
            open_questions += [task for task in questions if cast.name in task.prompt][:2]
        else:
            group = draw_task(rng, held_out=held_out)
        tasks += group
        num_words += sum(len(f"{task.prompt} {task.answer}".split()) for task in group)
    return _chat(tasks, rng)


def plain_story(rng: Random, *, held_out: bool) -> str:
    """A story as a plain document, with or without a title."""
    cast = draw_cast(rng, held_out=held_out)
    text = tell(cast, rng)
    if rng.random() < 0.3:
        text = f"{words.sentence(cast.fields()['who'])} and {cast.place}\n\n{text}"
    elif rng.random() < 0.3:
        text = f"The {cast.who.capitalize()} {words.located(cast.place)} the {cast.place}\n\n{text}"
    return render_text(text)


def story_book(rng: Random, *, held_out: bool) -> str:
    """A chain of stories in one long plain document, each with a title."""
    chapters: list[str] = []
    while sum(len(chapter.split()) for chapter in chapters) < LONG_CHAT_WORDS:
        cast = draw_cast(rng, held_out=held_out)
        title = f"Story {len(chapters) + 1}: The {cast.who} and the {cast.place}"
        chapters.append(f"{title}\n\n{tell(cast, rng)}")
    return render_text("\n\n".join(chapters))


def plain_reading(rng: Random, *, held_out: bool) -> str:
    """A text with questions and answers as a plain document."""
    text, tasks = reading(rng, held_out=held_out, most_facts=MOST_FACTS)
    lines = [f"Question: {task.prompt}\nAnswer: {task.answer}" for task in tasks]
    return render_text("\n".join((text, "", *lines)))


def plain_sums(rng: Random, *, held_out: bool) -> str:
    """A list of sums as a plain document."""
    return render_text(sum_list(rng, held_out=held_out))


Source = Callable[..., str]
Sources = tuple[tuple[Source, int], ...]

_PLAIN_SOURCES: Sources = ((plain_story, 9), (plain_sums, 5), (plain_reading, 6))
FIRST_SOURCES: Sources = ((partial(short_chat, shares=FIRST_SHARES), 80), *_PLAIN_SOURCES)
SHORT_SOURCES: Sources = ((short_chat, 80), *_PLAIN_SOURCES)
LONG_SOURCES: Sources = (
    (long_chat, 10),
    (story_book, 3),
    (short_chat, 12),
    (plain_story, 2),
    (plain_sums, 3),
)
"""Sources of documents with their relative frequencies, for the phases of a training run."""


def documents(
    seed: int, *, sources: Sources = SHORT_SOURCES, held_out: bool = False
) -> Iterator[str]:
    """Documents without end, special tokens spelled out; the same ones for the same arguments."""
    rng = Random(f"{seed}-{held_out}")
    makers, weights = zip(*sources, strict=True)
    while True:
        yield rng.choices(makers, weights)[0](rng, held_out=held_out)
