"""Mutated bodies: the answer is a result or the user's error, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
from typing import Any

import pytest

from lmi_core.errors import UserError
from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.base import Call
from lmi_server.dialects.lmi.lmi import parse_invocation
from lmi_server.dialects.lmi.schema import LmiParameters
from lmi_server.dialects.openai.chat_schema import ChatBody
from lmi_server.dialects.openai.completion_schema import CompletionBody
from lmi_server.dialects.openai.openai import parse_chat, parse_completion
from tests.engine.fake_runner import FakeRunner
from tests.server import fuzz
from tests.server.http.footprint import Footprint, growth_faults
from tests.server.models.test_real_engine import serving_engine
from tests.server.parsing import model_of

BODIES: list[dict[str, Any]] = [
    {"inputs": "hello", "parameters": {"max_new_tokens": 3}},
    {"inputs": ["a", "b"], "parameters": {"max_new_tokens": 2, "details": True}},
    {
        "inputs": "x",
        "stream": True,
        "parameters": {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "stop": ["y"]},
    },
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "logit_bias": {"5": 1}},
]
ODD_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**64,
    10**30,
    -0.5,
    1e308,
    1e-320,
    "",
    "x",
    "\x00",
    "é" * 50,
    "9" * 30,
    [],
    [[]],
    {},
    {"": None},
    [None],
    ["a", 1],
]
OPENAI_BODIES: list[dict[str, Any]] = [
    {"prompt": "hello", "max_tokens": 3, "n": 2, "logprobs": 1},
    {"prompt": ["a", [5, 6]], "max_tokens": 2, "echo": True, "stream": True},
    {
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 3,
        "logit_bias": {"5": 1},
        "stream": True,
        "stream_options": {"include_usage": True},
    },
]
OPENAI_NAMES = [*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, "no_such"]
NAMES = [*LmiParameters.__struct_fields__, "no_such", "inputs", "stream", "messages", "n", "stop"]


def mutated(
    rng: random.Random, bodies: list[dict[str, Any]] = BODIES, names: list[str] = NAMES
) -> bytes:
    """A valid body with some values, keys or bytes changed."""
    body = json.loads(json.dumps(rng.choice(bodies)))
    for _ in range(rng.randint(1, 3)):
        target = body
        nested = [value for value in body.values() if isinstance(value, dict)]
        if nested and rng.random() < 0.7:
            target = rng.choice(nested)
        name = rng.choice([*target, *names])
        target[name] = copy.deepcopy(rng.choice(ODD_VALUES))
    data = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.5).encode())
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 4)):
            position = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[position] = rng.randrange(256)
                case 1:
                    del data[position:]
                    data += b"}"
                case _:
                    data[position:position] = rng.choice([b"[", b"{", b'"', b"\\ud800", b"NaN"])
    return bytes(data)


def test_parsing_raises_nothing_but_user_errors() -> None:
    rng = random.Random(20240)
    model = model_of(chat_template=ChatTemplate({"default": "{{ messages }}"}))
    num_parsed = 0
    for _ in range(2000):
        call = Call(request_id="r", body=mutated(rng), content_type="application/json")
        with contextlib.suppress(UserError):
            num_parsed += len(parse_invocation(model, call).requests) > 0
    assert 200 < num_parsed < 1800


def test_openai_parsing_raises_nothing_but_user_errors() -> None:
    rng = random.Random(20241)
    model = model_of(chat_template=ChatTemplate({"default": "{{ messages }}"}))
    num_parsed = 0
    for _ in range(2000):
        body = mutated(rng, OPENAI_BODIES, OPENAI_NAMES)
        call = Call(request_id="r", body=body, content_type="application/json")
        parse = parse_chat if b'"messages"' in body else parse_completion
        with contextlib.suppress(UserError):
            num_parsed += len(parse(model, call).requests) > 0
    assert 200 < num_parsed < 1800


def test_openai_routes_answer_everything_and_leak_nothing() -> None:
    async def run() -> None:
        rng = random.Random(8)
        async with serving_engine(FakeRunner()) as (served, _):
            for number in range(300):
                body = mutated(rng, OPENAI_BODIES[:2], OPENAI_NAMES)
                answer = await served.post(
                    body,
                    ("/v1/completions", "/tokenize", "/detokenize")[number % 8 % 3],
                    headers={"Content-Type": "application/json"},
                )
                assert answer.status in (200, 400, 404), (body, answer)
                if answer.status != 200:
                    assert set(json.loads(answer.body)) == {"error"}

    asyncio.run(run())


def test_server_answers_everything_and_leaks_nothing() -> None:
    async def run() -> None:
        rng = random.Random(7)
        async with serving_engine(FakeRunner()) as (served, _):
            for _ in range(300):
                body = mutated(rng)
                answer = await served.post(body, headers={"Content-Type": "application/json"})
                assert answer.status in (200, 424), (body, answer)
                if answer.status == 424:
                    assert json.loads(answer.body)["code"] == 424

    asyncio.run(run())


def test_mutated_requests_to_every_route() -> None:
    """The first of the cases that ``make fuzz`` goes on with."""
    summary = asyncio.run(fuzz.session(0, 400, "1"))
    assert not summary.failures
    assert summary.num_requests == 400
    assert {"200", "400", "404", "405", "422", "424"} <= set(summary.statuses)


@pytest.mark.parametrize(
    ("bytes_per_round", "blocks_per_round", "words"),
    [
        (0, 0, None),
        (100_000, 200, None),
        (300_000, 200, "memory grew by 4800000 bytes in 16 rounds"),
        (0, 1000, "a request leaves 1.00 blocks of memory behind"),
        (2 << 20, 0, "memory grew from 80000000 to"),
    ],
)
def test_what_counts_as_growth(
    bytes_per_round: int, blocks_per_round: int, words: str | None
) -> None:
    rounds = [
        Footprint(80_000_000 + n * bytes_per_round, 300_000 + n * blocks_per_round)
        for n in range(31)
    ]
    faults = growth_faults(rounds, 1000)
    assert len(faults) == (words is not None)
    assert words is None or words in faults[0]
    # Few rounds are all warm-up.
    assert not growth_faults(rounds[:10], 1000)


def test_a_case_is_a_function_of_its_seed() -> None:
    assert fuzz.make_case("1-17") == fuzz.make_case("1-17")
    assert len({fuzz.make_case(f"1-{n}").data for n in range(100)}) > 60


@pytest.mark.parametrize(
    ("path", "answer", "fault"),
    [
        ("/invocations", b'HTTP/1.1 424 x\r\n\r\n{"code":424}', ""),
        (
            "/invocations",
            b"HTTP/1.1 424 x\r\nContent-Type: application/json\r\n\r\n{}",
            "an error of",
        ),
        ("/invocations", b"HTTP/1.1 422 x\r\n\r\n", "status 422"),
        ("/generate", b"HTTP/1.1 500 x\r\n\r\n", "status 500"),
        ("/generate", b"HTTP/1.1 200 x\r\n\r\nincident 7", "an unexpected failure"),
        ("/generate", b"", "no answer"),
    ],
)
def test_what_counts_as_a_failure(path: str, answer: bytes, fault: str) -> None:
    async def run() -> None:
        async with serving_engine(FakeRunner()) as (served, _):
            case = fuzz.Case("1", path, b"", is_complete=True, is_routed=True, leaves=False)
            assert fuzz.verdict(served, case, answer)[1].startswith(fault)
            assert bool(fault) == bool(fuzz.verdict(served, case, answer)[1])

    asyncio.run(run())
