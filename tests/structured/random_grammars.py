"""Random schemas and other grammars over HTTP: no text that is at its end is invalid.

``python -m tests.structured.random_grammars --requests 10000`` prints what came of them. The loop
is watched (``tests/server/watchdog.py``): a turn of more than 50 ms is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jsonschema

from tests.server.harness import Served
from tests.server.test_structured import serving_demo
from tests.server.watchdog import longest

_CONCURRENCY = 24
_MAX_TOKENS = 160
_SHOWN = 1000
WRONG = "wrong: seed"


class Asked(NamedTuple):
    """What a request says of its text, and whether a text is as it says."""

    fields: dict[str, Any]
    is_valid: Callable[[str], bool]


def random_schema(rng: random.Random, depth: int = 3) -> Any:
    """A schema of what grammars hold, small enough for short texts."""
    makers = [_string, _number, _values]
    if depth:
        makers += [_object, _object, _array, _any_of, _reference]
    schema = rng.choice(makers)(rng, depth - 1)
    if isinstance(schema, dict) and rng.random() < 0.2:
        schema["description"] = "of no matter"
    return schema


def _string(rng: random.Random, depth: int) -> Any:
    extra: list[dict[str, Any]] = [
        {"maxLength": rng.randrange(12)},
        {"pattern": rng.choice(["^[a-f]{2,4}$", "^(ab|c)+$", "[0-9]", "^é?$"]), "maxLength": 9},
        {"format": rng.choice(["date", "time", "uuid", "ipv4"])},
        {"minLength": 2, "maxLength": rng.randrange(2, 9)},
    ]
    return {"type": "string", **rng.choice(extra)}


def _number(rng: random.Random, depth: int) -> Any:
    low = rng.randrange(-1000, 1000)
    bounds: list[dict[str, Any]] = [
        {"minimum": low, "maximum": low + rng.randrange(500)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + rng.randrange(2, 50)},
        {"minimum": 0, "maximum": 99, "multipleOf": rng.choice([2, 5, 7])},
    ]
    return {"type": "integer", **rng.choice(bounds)}


def _values(rng: random.Random, depth: int) -> Any:
    values = [None, True, 3, -2.5, "a", 'b"\n', "ü🎉", [1, "x"], {"k": 0}]
    chosen = rng.sample(values, rng.randrange(1, 5))
    choices: list[Any] = [{"const": chosen[0]}, {"enum": chosen}, {"type": ["boolean", "null"]}]
    return rng.choice(choices)


def _object(rng: random.Random, depth: int) -> Any:
    names = rng.sample(["a", "b", "long name", "é", 'q"', "$x", "/", "0"], rng.randrange(1, 5))
    schema = {
        "type": "object",
        "properties": {name: random_schema(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if rng.random() < 0.1:
        del schema["properties"], schema["required"]
        schema["additionalProperties"] = random_schema(rng, 0)
        schema["maxProperties"] = 1
    return schema


def _array(rng: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {
        "type": "array",
        "items": random_schema(rng, depth),
        "maxItems": rng.randrange(1, 4),
    }
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, 0)]
    if rng.random() < 0.3:
        schema["minItems"] = 1
    return schema


def _any_of(rng: random.Random, depth: int) -> Any:
    return {"anyOf": [random_schema(rng, depth) for _ in range(rng.randrange(1, 4))]}


def _reference(rng: random.Random, depth: int) -> Any:
    return {"allOf": [random_schema(rng, depth)]}


def _with_definitions(rng: random.Random, schema: Any) -> Any:
    if rng.random() < 0.3:
        return {
            "$defs": {"d": schema},
            "type": "array",
            "items": {"$ref": "#/$defs/d"},
            "maxItems": 2,
        }
    return schema


def random_request(rng: random.Random) -> Asked:
    kind = rng.random()
    if kind < 0.7:
        return _schema_request(rng)
    if kind < 0.8:
        pattern = rng.choice([r"[a-f]{1,9}-[0-9]{2}", "(ab|cd)*e", "[^x\n]{0,20}x", "é+|[0-9]{3}"])
        return Asked({"guided_regex": pattern}, lambda text: bool(re.fullmatch(pattern, text)))
    if kind < 0.9:
        texts = [
            "".join(rng.choices('ab é"\n🎉', k=rng.randrange(1, 9)))
            for _ in range(rng.randrange(1, 30))
        ]
        return Asked({"guided_choice": texts}, texts.__contains__)
    if kind < 0.95:
        text = 'start: "[" one ("," one)* "]"\none: /[0-9]{1,3}/ | "true"'
        one = "(?:[0-9]{1,3}|true)"  # which JSON's numbers aren't: some begin with 0
        return Asked(
            {"guided_grammar": text},
            lambda text: bool(re.fullmatch(rf"\[{one}(?:,{one})*\]", text)),
        )
    schema = random_schema(rng, 1)
    tag = {"begin": "<f=a>", "schema": schema, "end": "</f>"}
    form = {"type": "structural_tag", "structures": [tag], "triggers": ["<f="]}
    return Asked(
        {"response_format": form},
        lambda text: _has_valid_tags(schema, text),
    )


def _has_valid_tags(schema: Any, text: str) -> bool:
    """Every trigger begins a whole tag; what looks like the tag's end may be in a JSON string."""
    while "<f=" in text:
        rest = text.partition("<f=")[2]
        if not rest.startswith("a>"):
            return False
        value, end = json.JSONDecoder().raw_decode(rest, 2)
        if not (_is_valid(schema, json.dumps(value)) and rest[end:].lstrip().startswith("</f>")):
            return False
        text = rest[end:]
    return True


def _schema_request(rng: random.Random) -> Asked:
    schema = _with_definitions(rng, random_schema(rng))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields: list[dict[str, Any]] = [
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"structured_outputs": {"json": schema}},
        {"response_format": form},
    ]
    return Asked(rng.choice(fields), lambda text: _is_valid(schema, text))


def _is_valid(schema: Any, text: str) -> bool:
    """By jsonschema, but that a time may have a leap second at any hour, which a grammar can't tell
    (``lmi_core/structured/README.md``), and a date the year 0, which Python hasn't."""
    text = re.sub(r"(:[0-5][0-9]):60", r"\1:59", text).replace('"0000-', '"0004-')
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return bool(
        jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(json.loads(text))
    )


async def ask(served: Served, seed: int, outcomes: Counter[str]) -> None:
    """Counts the answer; one that isn't what was asked for with its seed and text."""
    rng = random.Random(seed)
    asked = random_request(rng)
    body = {
        "prompt": "Go",
        "max_tokens": _MAX_TOKENS,
        "temperature": 1.5,
        "seed": seed,
        **asked.fields,
    }
    answer = await served.post(body, "/openai/v1/completions")
    given = json.loads(answer.body)
    if answer.status != 200:
        is_known = answer.status == 400
        outcomes[("" if is_known else f"{WRONG} {seed}: ") + given["error"]["message"][:90]] += 1
        return
    [choice] = given["choices"]
    outcomes[choice["finish_reason"]] += 1
    if choice["finish_reason"] != "stop":
        return
    # In a thread: the turns that are watched are the server's.
    if not await asyncio.to_thread(_says_valid, asked, choice["text"]):
        outcomes[f"{WRONG} {seed}: {asked.fields} {choice['text']!r}"] += 1


def _says_valid(asked: Asked, text: str) -> bool:
    try:
        return asked.is_valid(text)
    except ValueError:  # it isn't JSON
        return False


async def ask_all(served: Served, seeds: range) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    left = iter(seeds)

    async def client() -> None:
        for seed in left:
            await ask(served, seed, outcomes)

    async with asyncio.TaskGroup() as group:
        for _ in range(_CONCURRENCY):
            group.create_task(client())
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()

    outcomes: Counter[str] = Counter()

    async def use() -> None:
        async with serving_demo(api="openai") as served:
            end = arguments.first + arguments.requests
            for first in range(arguments.first, end, _SHOWN):
                outcomes.update(await ask_all(served, range(first, min(end, first + _SHOWN))))
                print(f"until seed {min(end, first + _SHOWN)}: {dict(outcomes)}", flush=True)

    try:
        asyncio.run(use())
    finally:
        for what, hold in longest.items():
            print(f"longest {what}: {hold.seconds * 1000:.1f} ms")


if __name__ == "__main__":
    main()
