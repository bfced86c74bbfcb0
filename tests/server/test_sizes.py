"""One request disturbs nobody, whatever its body holds: long, wide, deep, many."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lmi_core import _native
from lmi_core.engine.logits_processors import LogitsProcessors
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects import large_bodies
from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.http.options import ServerOptions
from lmi_server.models.stand_in import StandIn
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import byte_tokenizer, collect, make_engine
from tests.kernels.sampling_case import NEUTRAL
from tests.server.dialects.tgi.test_tgi_http import serving
from tests.server.fake_engine import FakeEngine
from tests.server.fuzz import CHAT, COMPLETION, INPUTS, RECORDED, TEMPLATE
from tests.server.models.test_models import recipe
from tests.server.sizes import SHAPES, grown
from tests.server.test_every_route import sendable
from tests.server.test_every_route import serving as every_route_serving
from tests.server.watchdog import ALLOWANCE, LIMIT_S, watched

MIB = 1 << 20
WIDE = 262_144
"""Tokens of the largest vocabularies."""
ROUTES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("/invocations", INPUTS, ("inputs", "stop", "no_such", "details")),
    ("/invocations", CHAT, ("messages", "logit_bias")),
    ("/v1/completions", COMPLETION, ("prompt", "stop", "no_such", "stop_token_ids")),
    ("/v1/chat/completions", CHAT, ("messages", "tools", "response_format", "guided_choice")),
    ("/tokenize", {"prompt": "x"}, ("prompt", "no_such")),
    ("/detokenize", {"tokens": [1]}, ("tokens",)),
    ("/generate", INPUTS, ("inputs", "stop", "grammar", "no_such")),
    ("/tgi/invocations", INPUTS, ("inputs",)),
    ("/tgi/v1/chat/completions", CHAT, ("messages", "tools")),
    ("/tgi/v1/completions", COMPLETION, ("prompt",)),
    ("/chat_tokenize", CHAT, ("messages",)),
    ("/tgi/tokenize", INPUTS, ("inputs",)),
]
CASES = [(path, body, name) for path, body, names in ROUTES for name in names]


@pytest.mark.parametrize(("path", "body", "name"), CASES, ids=lambda value: str(value)[:20])
def test_no_body_holds_the_loop(path: str, body: dict[str, Any], name: str) -> None:
    """The server's loop is watched; every answer is a result or the user's error."""
    bodies = [grown(body, name, shape, size) for shape in SHAPES for size in (60_000, MIB)]
    check(path, bodies)


def test_a_schema_of_many_properties_is_read_elsewhere() -> None:
    """An object takes four times as long as a number, so there needn't be as many."""
    properties = {f"property {i}": {"type": "string"} for i in range(3300)}
    assert large_bodies.is_large(json.dumps(properties).encode())
    assert not large_bodies.is_large(json.dumps([0.125] * 16_000).encode())


_LONG = 24 * MIB
_PART = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
UNKNOWN = {"model": "model", "no_such": 0}
LONG: dict[str, Callable[[], bytes]] = {
    "application/json": lambda: grown(UNKNOWN, "no_such", "numbers", _LONG),
    "application/x-www-form-urlencoded": lambda: b"model_name=model&a=" + b"%41" * (_LONG // 3),
    "multipart/form-data; boundary=x": lambda: (
        _PART % (b"model_name", b"model") + _PART % (b"a", b"\r\n--" * (_LONG // 4)) + b"--x--"
    ),
}


JSON, *FORMS = LONG
ASKED = [
    (path, method, content_type)
    for i, (path, method) in enumerate(sorted(sendable()))
    for content_type in (JSON, FORMS[i % 2])
]


@pytest.mark.parametrize(("path", "method", "content_type"), ASKED, ids=lambda text: text[:40])
def test_no_route_is_held_by_a_long_body(path: str, method: str, content_type: str) -> None:
    """Whether it reads one or not, and where a model is to be chosen by it."""
    body = LONG[content_type]()

    async def run() -> None:
        async with every_route_serving(others=[recipe("other", FakeEngine())]) as served:
            answer = await asyncio.to_thread(
                exchanged, served.port, path, body, content_type, method
            )
            assert int(answer.split(b" ", 2)[1]) < 500, answer[:600]

    asyncio.run(run())


def test_a_name_within_a_long_body_chooses_the_model() -> None:
    """Decoding the longest here takes twice as long as the loop may be held."""
    cases = []
    for name, status, size in (("other", 200, 5), ("model", 200, 5), ("none", 404, 56)):
        body = {"prompt": "x", "max_tokens": 1, "no_such": 0, "model": name}
        cases.append((name.encode(), status, grown(body, "no_such", "numbers", size * MIB)))

    async def run() -> None:
        async with every_route_serving(others=[recipe("other", FakeEngine())]) as served:
            for name, status, data in cases:
                path = "/v1/completions"
                answer = await asyncio.to_thread(exchanged, served.port, path, data)
                assert int(answer.split(b" ", 2)[1]) == status, answer[:600]
                assert name in answer

    asyncio.run(run())


MANY = {str(i): "x" for i in range(300_000)}
ALL_TOKENS = {"max_tokens": 800, "n": 8, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", **ALL_TOKENS, "logprobs": 5}),
        ("/v1/chat/completions", {**CHAT, **ALL_TOKENS, "top_logprobs": 5}),
        ("/v1/completions", {"prompt": "x " * 1500, "max_tokens": 1, "prompt_logprobs": 5}),
        ("/v1/completions", {"prompt": "x " * 1500, "max_tokens": 1, "logprobs": 5, "echo": True}),
        ("/detokenize", {"tokens": [66] * (2 * MIB)}),
        ("/tokenize", {"prompt": "x" * 4000, "return_token_strs": True}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1, "metadata": MANY}),
    ],
)
def test_no_answer_holds_the_loop(path: str, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()

    async def run() -> bytes:
        options: dict[str, Any] = {"api": "lmi", "chat_template": TEMPLATE}
        async with serving(FakeRunner(max_model_len=4096, num_blocks=900), **options) as served:
            answer = await asyncio.to_thread(exchanged, served.port, path, data)
            assert b" 200 OK" in answer[:20], answer[:600]
            return answer.partition(b"\r\n\r\n")[2]

    json.loads(asyncio.run(run()))


RANKED = {"max_new_tokens": 800, "details": True, "top_n_tokens": 20, "ignore_eos_token": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x " * 1500, "max_tokens": 1, "logprobs": 20, "echo": True}),
        ("/v1/completions", {"prompt": "x " * 1500, "max_tokens": 1, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "x", "n": 64, "max_tokens": 4, "logprobs": 20}),
        ("/invocations", {"inputs": "x", "parameters": {**RANKED, "do_sample": True}}),
    ],
)
def test_no_stream_holds_the_loop(path: str, body: dict[str, Any]) -> None:
    """Whose first frame names a long prompt, or whose last one all tokens."""
    data = json.dumps({**body, "stream": True}).encode()

    async def run() -> bytes:
        sizes = {"max_model_len": 4096, "num_blocks": 900, "max_logprobs": 20, "max_num_seqs": 64}
        runner = FakeRunner(max_logit_rows=64, **sizes)
        async with serving(runner, api="lmi") as served:
            return await asyncio.to_thread(exchanged, served.port, path, data)

    answer = asyncio.run(run())
    assert b" 200 OK" in answer[:20], answer[:600]
    assert b'"finish_reason"' in answer


def test_no_bias_holds_the_loop() -> None:
    """Of as many and as long sequences as may be, with a long prompt, of many choices: some are of
    the prompt's end, and some of every token that comes, beside those of a wide vocabulary."""
    x = byte_tokenizer().encode_now("x", add_special_tokens=False)
    biases = [[[*x * 63, i], 1.0] for i in range(512)] + [[[i, i // 2], -1.0] for i in range(512)]
    wide = {str(i): 0.5 for i in range(100_000)}
    parameters = {"n": 64, "max_new_tokens": 3, "do_sample": True, "ignore_eos_token": True}
    parameters |= {"sequence_bias": biases, "logit_bias": wide}
    body = json.dumps({"inputs": "x" * 16_000, "parameters": parameters}).encode()

    async def run() -> None:
        sizes = {"max_num_seqs": 64, "max_logit_rows": 64, "max_num_batched_tokens": 4096}
        sizes |= {"max_model_len": 17_000, "num_blocks": 6000, "vocab_size": WIDE}
        runner = FakeRunner(**sizes)
        async with serving(runner, api="lmi") as served:
            answer = await asyncio.to_thread(exchanged, served.port, "/invocations", body)
            assert b" 200 OK" in answer[:20], answer[:600]
        _, ids, _ = runner.sampling.native.gather([0])["biases"]
        assert len(ids) == 100_000

    asyncio.run(run())


def test_no_list_of_the_whole_vocabulary_holds_the_loop() -> None:
    """Checked, and made what rows take, however many of them a request has."""
    ids = tuple(range(256, WIDE))
    params = SamplingParams(
        max_new_tokens=4,
        min_new_tokens=2,
        stop_token_ids=ids,
        logit_bias=tuple((token_id, 1.0) for token_id in range(WIDE)),
        banned_token_ids=ids,
        allowed_token_ids=tuple(range(WIDE)),
        processors=LogitsProcessors(
            begin_suppress_tokens=ids,
            forced_eos_token_id=tuple(range(200, WIDE)),
            sequence_bias=tuple(((i, *range(63)), 1.0) for i in range(1024)),
        ),
    )

    async def run() -> None:
        async with make_engine(FakeRunner(vocab_size=WIDE)) as engine:
            with watched("whole vocabulary"):
                await asyncio.sleep(0)  # turns are watched from the next one on
                events = await collect(engine, "Hello", params)
            assert len(events) == 4

    asyncio.run(run())


def test_scales_of_many_tokens_are_quickly_found() -> None:
    """Of a long prompt's tokens and of as many that may end a text, which are partly the same."""
    prompt, ends = np.arange(0, 60_000, 3), np.arange(0, WIDE, 2)
    table = _native.SamplingTable(1, WIDE)
    scales = {"prompt_reward": 2.0, "prompt_ids": prompt, "length_ids": ends, "length_factor": 1.5}
    table.set(0, **NEUTRAL, **scales)
    table.observe(0, 5)
    started_s = time.thread_time()
    _, ids, above, below = table.gather([0])["scales"]
    assert time.thread_time() - started_s < ALLOWANCE * LIMIT_S
    assert len(set(ids.tolist())) == len(ids) == len(np.union1d(prompt, ends))
    found = dict(zip(ids.tolist(), zip(above.tolist(), below.tolist(), strict=True), strict=True))
    assert (found[3], found[2], found[6]) == ((2.0, 0.5), (1.5, 0.5), (3.0, 0.25))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "name", "shape"),
    [
        ("/invocations", INPUTS, "inputs", "words"),
        ("/v1/chat/completions", CHAT, "messages", "strings"),
        ("/generate", INPUTS, "stop", "objects"),
    ],
)
def test_nor_does_the_largest(
    path: str, body: dict[str, Any], name: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Words and objects take longer than they may, strings less.
    monkeypatch.setattr(large_bodies, "_PROCESSOR_S", 10 if shape == "strings" else 1)
    check(path, [grown(body, name, shape, 60 * MIB)])


DOUBLING = (
    "{% set n = namespace(s=['x']) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}"
)
CHAT_ROUTES = (
    "/invocations",
    "/v1/chat/completions",
    "/tgi/v1/chat/completions",
    "/tgi/invocations",
    "/tokenize",
    "/chat_tokenize",
)


@pytest.mark.parametrize("most", [50, 400_000])
@pytest.mark.parametrize("count", [None, 30, 60, -1])
@pytest.mark.parametrize("prompt", ["ab" * 150_000, (97, 98) * 150_000], ids=["text", "ids"])
def test_a_long_prompt_is_cut_in_the_child_as_beside_it(
    prompt: str | tuple[int, ...], count: int | None, most: int
) -> None:
    """``truncated`` cuts what isn't read in a child, and the engine refuses what is too long."""
    is_text = isinstance(prompt, str)
    asked = {"prompt": prompt} if is_text else {"prompt_token_ids": prompt}
    request = GenerationRequest(request_id="r", params=SamplingParams(), **asked)  # type: ignore[arg-type]
    ids = tuple(byte_tokenizer().encode_now("ab" * 150_000, add_special_tokens=True))
    ids = ids if is_text else prompt  # type: ignore[assignment]
    last = len(ids) if count is None else most if count < 0 else count
    stand_in = StandIn(
        options=ServerOptions(),
        known_tokenizer=byte_tokenizer(),
        known_info=replace(FakeEngine().info, max_prompt_tokens=most),
    )
    if min(len(ids), last) > most:
        with pytest.raises(UserError, match="maximum context length"):
            large_bodies._tokenized(request, count, stand_in)
    else:
        found = large_bodies._tokenized(request, count, stand_in)
        assert found.prompt_token_ids == ids[-last:]


LOOPS = "{%% for i in range(%d) %%}{%% for j in range(%d) %%}{%% endfor %%}{%% endfor %%}x"
LARGE = "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}"


# Each limit is tried on some routes; that there are limits, on all of them.
@pytest.mark.parametrize(
    ("path", "source", "is_served"),
    [
        *((path, LOOPS % (1500, 1500), True) for path in CHAT_ROUTES),
        *((path, LOOPS % (99999, 99999), False) for path in CHAT_ROUTES[::2]),
        *((path, LARGE, False) for path in CHAT_ROUTES[1::2]),
        ("/v1/chat/completions", DOUBLING, False),
    ],
)
def test_a_costly_chat_template(
    path: str, source: str, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its own request's time, with an end, and nobody else's."""
    monkeypatch.setattr(large_bodies, "_PROCESSOR_S", 10 if is_served else 1)

    async def run() -> None:
        template = ChatTemplate({"default": source})
        options: dict[str, Any] = {"api": "lmi", "chat_template": template, "tgi": TgiOptions()}
        async with serving(FakeRunner(max_model_len=512), **options) as served:
            answer = await served.post({"messages": CHAT["messages"], "max_tokens": 2}, path)
            assert (answer.status == 200) == is_served, answer.body
            assert answer.status in (200, 400, 422, 424)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [(path, body) for method, path, body in RECORDED if method == "POST"],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_large_body_is_answered_as_a_small_one(path: str, body: dict[str, Any]) -> None:
    """Each route's, though another process has read it."""

    async def run() -> None:
        options: dict[str, Any] = {"api": "lmi", "chat_template": TEMPLATE, "tgi": TgiOptions()}
        async with serving(FakeRunner(max_model_len=2048), **options) as served:
            small = await served.post(body, path)
            large = await served.post({**body, "no_such": [0] * 40_000}, path)
            assert large.status == small.status != 500, (small.body, large.body)
            assert large.headers["Content-Type"] == small.headers["Content-Type"]
            if small.status != 200 or "do_sample" not in str(body):
                assert large.body[:10] == small.body[:10]
            if small.status != 200:
                assert large.body == small.body

    asyncio.run(run())


def check(path: str, bodies: list[bytes]) -> None:
    async def run() -> None:
        options: dict[str, Any] = {"api": "lmi", "chat_template": TEMPLATE, "tgi": TgiOptions()}
        async with serving(FakeRunner(max_model_len=4096), **options) as served:
            for data in bodies:
                # In a thread, so that the client's own work isn't the loop's.
                answer = await asyncio.to_thread(exchanged, served.port, path, data)
                status = int(answer.split(b" ", 2)[1])
                assert status in (200, 400, 422, 424), (data[:300], answer[:600])

    asyncio.run(run())


def exchanged(
    port: int,
    path: str,
    body: bytes,
    content_type: str = "application/json",
    method: str = "POST",
) -> bytes:
    """The answer to a body on a connection of its own."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    sizes = f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        connection.sendall((head + sizes).encode())
        with suppress(ConnectionError):  # it may be refused before it is read
            connection.sendall(body)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))
