"""Answers as small JSON objects with the keys that were asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from bench.demo import words
from bench.demo.split import is_held_out
from bench.demo.task import Task

Value = str | int | float | bool | list[str]


def _of(options: tuple[str, ...]) -> Callable[[Random], Value]:
    return lambda rng: rng.choice(options)


def _between(low: int, high: int) -> Callable[[Random], Value]:
    return lambda rng: rng.randint(low, high)


def _flag(rng: Random) -> Value:
    return rng.random() < 0.5


def _some(options: tuple[str, ...]) -> Callable[[Random], Value]:
    return lambda rng: rng.sample(options, rng.randint(1, 3))


def _price(rng: Random) -> Value:
    return rng.randint(1, 99) + rng.choice((0.25, 0.5, 0.75, 0.99))


FIELDS: dict[str, Callable[[Random], Value]] = {
    "name": words.pick_name,
    "first_name": words.pick_name,
    "friend": words.pick_name,
    "owner": words.pick_name,
    "author": words.pick_name,
    "age": _between(1, 99),
    "year": _between(1900, 2029),
    "count": _between(1, 99),
    "number": _between(1, 99),
    "score": _between(1, 99),
    "price": _price,
    "height": _between(1, 99),
    "weight": _between(1, 99),
    "color": _of(words.COLORS),
    "city": _of(words.CITIES),
    "place": _of(words.PLACES),
    "location": _of(words.PLACES),
    "home": _of(words.PLACES),
    "animal": _of(words.CHARACTERS),
    "character": _of(words.CHARACTERS),
    "pet": _of(("cat", "dog", "rabbit", "horse", "parrot", "turtle", "goat", "mouse")),
    "food": _of(words.FOODS),
    "drink": _of(("water", "milk", "tea", "juice", "coffee", "cocoa")),
    "job": _of(words.JOBS),
    "hobby": _of(words.ACTIVITIES),
    "day": _of(words.DAYS),
    "month": _of(words.MONTHS),
    "season": _of(words.SEASONS),
    "weather": _of(words.WEATHERS),
    "item": _of(words.OBJECTS),
    "object": _of(words.OBJECTS),
    "toy": _of(words.OBJECTS),
    "mood": _of(words.TRAITS),
    "trait": _of(words.TRAITS),
    "size": _of(("small", "medium", "large", "tiny", "big")),
    "shape": _of(("round", "square", "flat", "long", "short")),
    "title": _of(("The Fox", "The Old Castle", "A Long Night", "The Lost Key", "My Friend")),
    "language": _of(("English", "French", "German", "Spanish", "Italian", "Greek")),
    "active": _flag,
    "happy": _flag,
    "done": _flag,
    "foods": _some(words.FOODS),
    "colors": _some(words.COLORS),
    "friends": _some(words.NAMES),
    "items": _some(words.OBJECTS),
}

REQUESTS = (
    "Write a JSON object with the keys {keys}.",
    "Give me a JSON object with the keys {keys}.",
    "Answer with a JSON object that has the keys {keys}.",
    "Make a small JSON object with {keys}.",
    "Return JSON with the keys {keys}.",
    "Return a JSON object with these keys: {keys}",
    "Please write JSON with the keys {keys}.",
    "I need a JSON object. Keys: {keys}.",
    "Describe {topic} as a JSON object with the keys {keys}.",
    "Describe {topic} in JSON with the keys {keys}.",
    "Reply in JSON only. Use the keys {keys}.",
)

EXTRACTIONS = (
    "{text}\n\nWrite this as a JSON object with the keys {keys}.",
    "Text: {text}\nReturn JSON with the keys {keys}.",
    "Turn this text into JSON with the keys {keys}: {text}",
)

STATEMENTS = {
    "name": "This is {v}.",
    "age": "The age is {v}.",
    "color": "The color is {v}.",
    "city": "The city is {v}.",
    "place": "The place is the {v}.",
    "food": "The food is {v}.",
    "job": "The job is {v}.",
    "hobby": "The hobby is {v}.",
    "item": "The item is a {v}.",
    "animal": "The animal is a {v}.",
    "day": "The day is {v}.",
    "month": "The month is {v}.",
    "friend": "The friend is {v}.",
    "price": "The price is {v}.",
}


def draw_keys(rng: Random, options: list[str], *, held_out: bool) -> list[str]:
    """One to five keys whose set is, or is not, held out.

    In training there are up to seven, some of them made up: known keys in known numbers would
    not have to be copied.
    """
    while True:
        keys = rng.sample(options, rng.randint(1, 5 if held_out else 7))
        if not held_out and rng.random() < 0.2:
            made_up = rng.choice((words.coin_word(rng), rng.choice(words.OBJECTS)))
            keys[rng.randrange(len(keys))] = made_up
        is_usable = len(set(keys)) == len(keys)
        if is_usable and is_held_out("keys", *sorted(keys)) == held_out:
            return keys


def list_keys(keys: list[str], rng: Random) -> str:
    """The keys as a request names them: quoted or bare, with or without "and"."""
    names = [f'"{key}"' for key in keys] if rng.random() < 0.9 else keys
    return words.join_and(names) if rng.random() < 0.7 else ", ".join(names)


def fill(key: str, rng: Random) -> Value:
    """A value that suits `key`; unknown keys get an object's name."""
    return FIELDS.get(key, _of(words.OBJECTS))(rng)


def record_task(rng: Random, *, held_out: bool) -> Task:
    """A request for a JSON object."""
    if rng.random() < 0.25:
        return extraction_task(rng, held_out=held_out)
    keys = draw_keys(rng, list(FIELDS), held_out=held_out)
    topic = words.article(rng.choice(rng.choice((words.CHARACTERS, words.OBJECTS, words.PLACES))))
    request = rng.choice(REQUESTS).format(keys=list_keys(keys, rng), topic=topic)
    answer = json.dumps({key: fill(key, rng) for key in keys})
    return Task("json", request, answer, keys=tuple(keys))


def extraction_task(rng: Random, *, held_out: bool) -> Task:
    """A request to write the facts of a text as a JSON object."""
    keys = draw_keys(rng, list(STATEMENTS), held_out=held_out)
    values = {key: fill(key, rng) for key in keys}
    told = rng.sample(keys, len(keys))
    text = " ".join(
        STATEMENTS.get(key, f"The {key} is {{v}}.").format(v=values[key]) for key in told
    )
    request = rng.choice(EXTRACTIONS).format(text=text, keys=list_keys(keys, rng))
    return Task("json", request, json.dumps(values), keys=tuple(keys))
