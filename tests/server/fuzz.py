"""Mutated requests to every route: a result or an error of the dialect's form, and nothing leaks.

``python -m tests.server.fuzz --requests 100000`` mutates recorded valid requests and prints what
came of them; a failing one is printed with the seed that ``--only SEED`` sends again.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import logging
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.http.openapi import TABLE
from tests.engine.fake_runner import FakeRunner
from tests.server.dialects.tgi.test_tgi_http import serving
from tests.server.harness import Served, eventually
from tests.server.http.footprint import footprint, growth_faults
from tests.server.sizes import SHAPES, grown
from tests.server.watchdog import longest

CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hé"}]},
    ],
    "max_tokens": 3,
    "temperature": 0.5,
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1},
}
COMPLETION = {"prompt": ["a", "b"], "max_tokens": 2, "n": 2, "logprobs": 1, "echo": True}
INPUTS = {
    "inputs": "Once upon a time",
    "parameters": {
        "max_new_tokens": 3,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ["y"],
        "details": True,
        "seed": 1,
        "decoder_input_details": False,
        "repetition_penalty": 1.1,
    },
}
STREAM = {"stream": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto"}
STRUCTURED = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
GRAMMAR = {"parameters": {"max_new_tokens": 4, "grammar": {"type": "json", "value": SCHEMA}}}
RECORDED: tuple[tuple[str, str, dict[str, Any] | None], ...] = (
    ("POST", "/invocations", INPUTS),
    ("POST", "/invocations", INPUTS | STREAM),
    ("POST", "/invocations", INPUTS | {"inputs": ["a", "b"]}),
    ("POST", "/invocations", CHAT | STREAM),
    ("POST", "/predictions/model", INPUTS | {"parameters": {"n": 2, "top_n_tokens": 1}}),
    ("POST", "/predictions/model/1", INPUTS),
    ("POST", "/models/model/invoke", INPUTS),
    ("GET", "/models", None),
    ("GET", "/models/model", None),
    ("GET", "/adapters", None),
    ("GET", "/ping", None),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", CHAT | STREAM | {"stream_options": {"include_usage": True}}),
    ("POST", "/v1/completions", COMPLETION),
    ("POST", "/v1/completions", COMPLETION | STREAM | {"prompt": [5, 6, 7]}),
    ("POST", "/v1/chat/completions", CHAT | TOOLS | STREAM),
    ("POST", "/v1/chat/completions", CHAT | STRUCTURED),
    ("POST", "/v1/completions", COMPLETION | {"guided_regex": "a+"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/model", None),
    ("POST", "/tokenize", {"prompt": "a b", "add_special_tokens": False}),
    ("POST", "/tokenize", CHAT),
    ("POST", "/detokenize", {"tokens": [1, 2, 3]}),
    ("GET", "/health", None),
    ("GET", "/metrics", None),
    ("GET", "/openapi.json", None),
    ("POST", "/", INPUTS),
    ("POST", "/generate", INPUTS),
    ("POST", "/generate", {"inputs": "x", "parameters": {"best_of": 2, "do_sample": True}}),
    ("POST", "/generate_stream", INPUTS),
    ("POST", "/generate_stream", INPUTS | GRAMMAR),
    ("POST", "/tgi/v1/chat/completions", CHAT | TOOLS),
    ("POST", "/chat_tokenize", CHAT),
    ("GET", "/info", None),
    ("POST", "/tgi/invocations", INPUTS | STREAM),
    ("POST", "/tgi/v1/chat/completions", CHAT | STREAM),
    ("POST", "/tgi/v1/completions", COMPLETION),
    ("POST", "/tgi/tokenize", INPUTS),
)
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 127, 129, 2**31, 2**32, 2**63, 2**64, 10**30, -0.5, 0.5, 1.0,
    1e308, 1e-320, "", "x", "\x00", "é" * 50, "9" * 30, "a " * 200, "\u202e", [], [[]], {}, [None],
    {"": None}, ["a", 1], [1, 2], [[1], [2]], {"type": "text"}, {"type": "json_object"}, [{}],
    [{"role": "user", "content": ""}], "json", "sse", "jsonlines",
)  # fmt: skip
FRAGMENTS = (
    b"[", b"{", b'"', b"}", b",", b"\\ud800", b"NaN", b"-", b"1e999", b"\x00", b"\xff", b"null",
    b'{"a":' * 70, b"[" * 70, b'"inputs":', b'"prompt": "x",',
)  # fmt: skip
HEADERS = (
    ("Content-Type", ("application/json", "text/plain", "image/png", "", "application/x+json")),
    ("Accept", ("text/event-stream", "*/*", "\xff")),
    ("model_name", ("model", "other")),
    ("X-Amzn-SageMaker-Custom-Attributes", ("a=1;b", "model_name=other", ";;==", "handler=x")),
    ("X-Amzn-SageMaker-Adapter-Identifier", ("", "fr")),
    ("x-request-id", ("same", "a b", "x" * 200)),
    ("Content-Encoding", ("gzip", "deflate", "br", "none")),
    ("Transfer-Encoding", ("chunked", "identity")),
    ("Expect", ("100-continue", "tea")),
    ("Content-Length", ("0", "5", "-1", "x", "99999999999999999999")),
    ("Origin", ("https://a.example",)),
    ("Range", ("bytes=0-1",)),
    ("Upgrade", ("websocket", "h2c")),
    ("Long", ("x" * 9000,)),
)
PATHS = ("", "/nothing", "?model_name=model", "?model_name=x", "%00", "/..", "//", "%zz", "é")
METHODS = ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "CONNECT", "FOO")
TEMPLATE = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
_READ_AT_ONCE = 1 << 16
_EXTRA_STATUSES = {200, 405, 417, 431}
_NAMES = sorted(
    {name for _, _, body in RECORDED for name in body or ()}
    | set(INPUTS["parameters"])
    | {"no_such", "adapters", "tools", "guided_json", "suffix", "grammar", "watermark", "truncate"}
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request as bytes; what isn't complete is given up by the client."""

    seed: str
    path: str
    data: bytes
    is_complete: bool
    is_routed: bool
    """The path is one of the recorded ones, so that its dialect is known."""
    leaves: bool
    """The client closes without reading the answer."""


@dataclass(slots=True)
class Summary:
    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    num_requests: int = 0


def make_case(seed: str) -> Case:
    rng = random.Random(seed)
    method, path, recorded = rng.choice(RECORDED)
    body = b"" if recorded is None else mutated_body(rng, recorded)
    if recorded is not None and rng.random() < 0.02:
        body = grown_body(rng, recorded)
    headers = {"Host": "x", "Connection": "close", "Content-Type": "application/json"}
    if body or method == "POST":
        headers["Content-Length"] = str(len(body))
    is_complete = True
    if rng.random() < 0.2:
        name, values = rng.choice(HEADERS)
        headers[name] = rng.choice(values)
        is_complete = name not in ("Transfer-Encoding", "Content-Length", "Upgrade")
    is_routed = rng.random() < 0.9
    if not is_routed:
        path += rng.choice(PATHS)
    if rng.random() < 0.1:
        method = rng.choice(METHODS)
        if path.startswith("/models/") and method == "DELETE":
            method = "PUT"  # the model is still needed
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    data = "\r\n".join([*lines, "", ""]).encode("utf-8") + body
    if rng.random() < 0.05:
        data, is_complete = mutated_bytes(rng, data, rng.randint(1, 3)), False
    return Case(seed, path, data, is_complete, is_routed, leaves=rng.random() < 0.03)


def mutated_body(rng: random.Random, recorded: dict[str, Any]) -> bytes:
    """A valid body with some values, keys or bytes changed."""
    body = json.loads(json.dumps(recorded))
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        target = body
        nested = [value for value in body.values() if isinstance(value, dict)]
        if nested and rng.random() < 0.6:
            target = rng.choice(nested)
        name = rng.choice([*target, *_NAMES] if rng.random() < 0.5 else [*target, "no_such"])
        if rng.random() < 0.15:
            target.pop(name, None)
        else:
            target[name] = copy.deepcopy(rng.choice(ODD_VALUES))
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace")
    return mutated_bytes(rng, data, rng.randint(1, 4)) if rng.random() < 0.25 else data


def grown_body(rng: random.Random, recorded: dict[str, Any]) -> bytes:
    """A valid body with a value that is large: up to 8 MiB, mostly less."""
    name = rng.choice([*recorded, *recorded.get("parameters", ()), *_NAMES])
    return grown(recorded, name, rng.choice(list(SHAPES)), int(2 ** rng.uniform(12, 23)))


def mutated_bytes(rng: random.Random, data: bytes, number: int) -> bytes:
    changed = bytearray(data)
    for _ in range(number):
        position = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0:
                changed[position : position + 1] = bytes([rng.randrange(256)])
            case 1:
                del changed[position:]
            case 2:
                changed[position:position] = rng.choice(FRAGMENTS)
            case _:
                start = rng.randrange(len(changed) + 1)
                changed[position:position] = changed[start : start + rng.randint(1, 40)]
    return bytes(changed)


async def send(served: Served, case: Case) -> bytes:
    """The whole answer; empty when there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    try:
        writer.write(case.data)
        if case.leaves:
            await reader.read(1 if case.is_complete else 0)
            return b""
        try:
            async with asyncio.timeout(60 if case.is_complete else 0.1):
                return await reader.read()
        except TimeoutError:
            if case.is_complete:
                raise
            return b""
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


def verdict(served: Served, case: Case, answer: bytes) -> tuple[str, str]:
    """What came, and what is wrong with it (empty: nothing)."""
    if not answer:
        # What is refused before it is read resets the connection of a client that still writes.
        is_long = len(case.data) > _READ_AT_ONCE
        expected = case.leaves or not case.is_complete or is_long
        return "none", "" if expected else "no answer"
    while answer.startswith(b"HTTP/1.1 100 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    dialect = served.server.app[TABLE].of(case.path.partition("?")[0])
    is_known = case.is_complete and case.is_routed
    if is_known and status not in {*dialect.errors.statuses, *_EXTRA_STATUSES} - {500}:
        return str(status), f"status {status}"
    if status >= 500 or b"incident" in body:
        return str(status), "an unexpected failure"
    is_json = b"content-type: application/json" in head.lower()
    if status >= 400 and is_json and is_known and body:
        return str(status), fault_of_error(dialect.name, body)
    return str(status), ""


def fault_of_error(dialect: str, body: bytes) -> str:
    try:
        error = json.loads(body)
    except ValueError:
        return "an error that is not JSON"
    expected = {
        "lmi": ({"code", "error"}, {"code", "type", "message"}),
        "openai": ({"error"},),
        "tgi": ({"error", "error_type"},),
    }[dialect]
    return "" if set(error) in expected else f"an error of another form than {dialect}'s"


async def fuzz(served: Served, seeds: list[str], summary: Summary, num_clients: int = 4) -> None:
    """Send the cases; failures are described in ``summary``."""
    waiting = iter(seeds)

    async def client() -> None:
        for seed in waiting:
            case = make_case(seed)
            try:
                what, fault = verdict(served, case, await send(served, case))
            except TimeoutError:
                what, fault = "none", "no answer within 60 s"
            summary.statuses[what] += 1
            summary.num_requests += 1
            if fault:
                summary.failures.append(f"{seed}: {fault}: {case.data[:600]!r}")
                print(summary.failures[-1], file=sys.stderr, flush=True)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    await eventually(lambda: served.models.num_in_flight == 0)
    try:
        # The blocks of a request that was left come back with the step in flight.
        await eventually(lambda: is_idle(served))
    except TimeoutError:
        summary.failures.append(
            f"the engine is not idle after {seeds[-1]}: {served.engine.stats()}"
        )


def is_idle(served: Served) -> bool:
    stats = served.engine.stats()
    return not (stats.num_running or stats.num_waiting or stats.num_used_blocks)


class Errors(logging.Handler):
    """Collects what the server logs as an error: failures that nobody expected."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


async def session(first: int, number: int, seed: str, num_per_round: int = 1000) -> Summary:
    """Cases ``first`` to ``first + number`` on one server; prints a line now and then."""
    summary, errors = Summary(), Errors()
    logging.getLogger("lmi_server").addHandler(errors)
    logging.getLogger("aiohttp").addHandler(errors)
    options = {"api": "lmi", "chat_template": TEMPLATE, "tgi": TgiOptions(max_stop_sequences=99)}
    async with serving(FakeRunner(max_model_len=48), **options) as served:
        num_tasks, rounds = len(asyncio.all_tasks()), [footprint()]
        started = time.monotonic()
        for begin in range(first, first + number, num_per_round):
            end = min(begin + num_per_round, first + number)
            await fuzz(served, [f"{seed}-{n}" for n in range(begin, end)], summary)
            await eventually(lambda: len(asyncio.all_tasks()) <= num_tasks)
            rounds.append(footprint())
            if (end - first) % (10 * num_per_round) == 0 or end == first + number:
                print(
                    f"{summary.num_requests} requests, {time.monotonic() - started:.0f} s, "
                    f"{rounds[-1].resident_bytes >> 20} MiB, {rounds[-1].num_blocks} blocks, "
                    f"{len(summary.failures)} failures",
                    flush=True,
                )
    summary.failures += [f"logged: {text}" for text in errors.texts]
    summary.failures += growth_faults(rounds, num_per_round)
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", default="1")
    parser.add_argument("--only", help="SEED-NUMBER of one case")
    arguments = parser.parse_args()
    logging.getLogger("lmi_server").setLevel(logging.ERROR)
    seed, _, number = (arguments.only or arguments.seed).partition("-")
    if number:
        case = make_case(arguments.only)
        print(case)
        summary = asyncio.run(session(int(number), 1, seed))
    else:
        summary = asyncio.run(session(arguments.first, arguments.requests, seed))
    print(dict(sorted(summary.statuses.items())))
    print({f"longest {what}": f"{hold.seconds * 1000:.1f} ms" for what, hold in longest.items()})
    for failure in summary.failures[:20]:
        print(failure, file=sys.stderr)
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
