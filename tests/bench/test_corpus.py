"""The corpus is determined by its seed, keeps held-out combinations out, and answers rightly."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from itertools import islice
from random import Random

import pytest

from bench.demo.chat import SPECIAL_TOKENS
from bench.demo.corpus import FIRST_SOURCES, LONG_SOURCES, SHORT_SOURCES, documents
from bench.demo.reading import draw_facts, fix_articles, reading_task
from bench.demo.records import FIELDS, draw_keys, record_task
from bench.demo.split import HELD_OUT_SHARE, is_held_out
from bench.demo.story import draw_cast, story_task
from bench.demo.sums import draw_pair, sum_task
from bench.demo.task import Task, contains

TASKS = {
    "story": story_task,
    "reading": reading_task,
    "json": record_task,
    "sum1": lambda rng, held_out: sum_task(rng, 1, held_out=held_out),
    "sum2": lambda rng, held_out: sum_task(rng, 2, held_out=held_out),
}

PHASES = {"first": FIRST_SOURCES, "short": SHORT_SOURCES, "long": LONG_SOURCES}


@pytest.mark.parametrize("sources", PHASES.values(), ids=PHASES)
def test_same_seed_gives_same_documents(sources) -> None:
    first = list(islice(documents(7, sources=sources), 40))
    assert first == list(islice(documents(7, sources=sources), 40))
    assert first != list(islice(documents(8, sources=sources), 40))


def test_corpus_is_the_one_that_the_model_was_trained_on() -> None:
    texts = [
        text for sources in PHASES.values() for text in islice(documents(1, sources=sources), 200)
    ]
    digest = sha256("".join(texts).encode()).hexdigest()
    assert digest == "540b930082af4188f35059c81e0c81ec26bb7e5296d41ea2b00440ebb0cc93cb"


def test_held_out_documents_differ_from_training_ones() -> None:
    trained = set(islice(documents(1), 300))
    assert not trained & set(islice(documents(1, held_out=True), 300))


def test_held_out_share() -> None:
    num_held_out = sum(is_held_out("sum", a, b) for a in range(100) for b in range(100))
    assert num_held_out == pytest.approx(10_000 / HELD_OUT_SHARE, rel=0.1)


def test_held_out_is_stable_and_ordered() -> None:
    assert [b for b in range(10) if is_held_out("sum", 4, b)] == [1, 6, 9]
    assert not is_held_out("sum", 9, 4)


@pytest.mark.parametrize("held_out", [False, True])
def test_every_drawn_combination_is_on_its_side(held_out: bool) -> None:
    rng = Random(3)
    for _ in range(100):
        cast = draw_cast(rng, held_out=held_out)
        assert is_held_out("story", cast.who, cast.place) == held_out
        assert is_held_out("sum", *draw_pair(rng, 2, held_out=held_out)) == held_out
        assert is_held_out("sum", *draw_pair(rng, 1, held_out=held_out)) == held_out
        keys = draw_keys(rng, list(FIELDS), held_out=held_out)
        assert is_held_out("keys", *sorted(keys)) == held_out
        for fact in draw_facts(rng, 6, held_out=held_out):
            assert is_held_out("fact", fact.relation.name, fact.subject, fact.value) == held_out


def test_training_text_states_no_held_out_sum() -> None:
    for text in islice(documents(5), 1000):
        for a, b, total in re.findall(r"(\d+) \+ (\d+) = (\d+)", text):
            assert int(a) + int(b) == int(total)
            assert not is_held_out("sum", int(a), int(b))


@pytest.mark.parametrize("kind", TASKS)
def test_task_accepts_its_own_answer_only(kind: str) -> None:
    rng = Random(11)
    tasks = [TASKS[kind](rng, held_out=False) for _ in range(200)]
    assert [task for task in tasks if not task.accepts(task.answer)] == []
    assert not any(task.accepts("") for task in tasks)
    assert not any(task.accepts("I do not know.") for task in tasks)


def test_task_refuses_wrong_answers() -> None:
    task = Task("sum1", "3 + 4 =", "3 + 4 = 7", required=("= 7",))
    assert task.accepts("3 + 4 = 7")
    assert not task.accepts("3 + 4 = 70")
    task = Task("reading", "", "", required=("red ball",), forbidden=("blue kite",))
    assert not task.accepts("Mila has a red ball and a blue kite.")


@pytest.mark.parametrize("answer", ['{"a": 1', '{"a": 1}', '{"a": 1, "b": 2, "c": 3}', "[1]", "no"])
def test_task_refuses_wrong_objects(answer: str) -> None:
    task = Task("json", "", "", keys=("a", "b"))
    assert task.accepts('{"b": 1, "a": [2]}')
    assert not task.accepts(answer)


def test_record_answers_are_objects_in_the_asked_order() -> None:
    rng = Random(2)
    for _ in range(100):
        task = record_task(rng, held_out=False)
        assert tuple(json.loads(task.answer)) == task.keys


def test_contains_means_whole_words() -> None:
    assert contains("The Fox ran.", "fox")
    assert not contains("A foxglove", "fox")


def test_articles() -> None:
    assert fix_articles("A owl has a apple and a key") == "An owl has an apple and a key"


def test_special_tokens_mark_turns_only() -> None:
    for text in islice(documents(4, sources=LONG_SOURCES), 50):
        assert text.startswith(SPECIAL_TOKENS[0])
        assert text.count(SPECIAL_TOKENS[0]) == 1
