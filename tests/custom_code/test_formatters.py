"""Formatters in a real process, in each of their signatures."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmi_core.custom_code.call import HandlerRequest
from lmi_core.custom_code.errors import FailureKind, HandlerError
from lmi_core.custom_code.formatters import Formatters
from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.errors import ModelError, UserError
from lmi_core.settings.custom_code_config import CustomCodeConfig
from tests.server.harness import eventually


@asynccontextmanager
async def running(directory: Path, text: str, **fields: Any) -> AsyncIterator[Formatters]:
    path = directory / "model.py"
    path.write_text(textwrap.dedent(text))
    fields = {"output_formatter": "f", **fields}
    config = CustomCodeConfig(path=path, model_dir=directory, **fields)
    formatter = Formatters(config)
    await formatter.start()
    try:
        yield formatter
    finally:
        await formatter.stop()
    assert len(asyncio.all_tasks()) == 1


def events(*texts: str, start: int = 0, ends: bool = False) -> list[TokenEvent]:
    last = len(texts) - 1
    return [
        TokenEvent(
            request_id="r",
            choice=0,
            token_id=start + i,
            text=text,
            logprob=-1.0,
            finish_reason=FinishReason.EOS if ends and i == last else None,
        )
        for i, text in enumerate(texts)
    ]


ONE = """
    def f(output):
        sequence = output.sequences[0]
        token, first, last = sequence.get_next_token()
        return f"{token.text}/{first}/{last}/{output.finished}/{sequence.cumulative_log_prob};"
"""
SIX = """
    def f(token, first_token, last_token, details, generated_text, id):
        return f"{token.text}/{first_token}/{last_token}/{sorted(details)}/{generated_text};"
"""
FIVE = """
    def f(token, first_token, last_token, details, generated_tokens):
        return f"{token.text}/{details.get('finish_reason')}/{generated_tokens};".encode()
"""
DICT = """
    def f(output):
        return {"é": output.sequences[0].tokens[-1].id} if output.finished else None
"""


@pytest.mark.parametrize(
    ("text", "details", "expected"),
    [
        (ONE, False, "a/True/False/False/-1.0;b/False/False/False/-2.0;c/False/True/True/-3.0;"),
        (SIX, False, "a/True/False/[]/a;b/False/False/[]/ab;c/False/True/[]/abc;"),
        (FIVE, True, "a/None/a;b/None/ab;c/eos_token/abc;"),
        (DICT, False, '{"é": 2}\n'),
    ],
)
def test_signatures(tmp_path: Path, text: str, details: bool, expected: str) -> None:
    async def run() -> None:
        async with running(tmp_path, text) as formatter:
            stream = formatter.open("prompt", {"details": details})
            body = await stream.format(events("a", "b"))
            body += await stream.format(events("c", start=2, ends=True))
            assert body.decode() == expected

    asyncio.run(run())


def test_streams_do_not_mix(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, SIX) as formatter:
            streams = [formatter.open(str(i), {}) for i in range(8)]
            for _ in range(3):
                await asyncio.gather(*(s.format(events(str(i))) for i, s in enumerate(streams)))
            bodies = await asyncio.gather(*(s.format(events("!", ends=True)) for s in streams))
            assert bodies == [f"!/False/True/[]/{i}{i}{i}!;".encode() for i in range(8)]

    asyncio.run(run())


def test_a_formatter_that_raises_fails_its_stream_only(tmp_path: Path) -> None:
    text = """
        def f(output):
            if output.input.input_text == "bad" and len(output.sequences[0].tokens) == 2:
                raise ValueError("not this one")
            return output.input.input_text
    """

    async def run() -> None:
        async with running(tmp_path, text) as formatter:
            good, bad = formatter.open("good", {}), formatter.open("bad", {})
            assert await bad.format(events("a", "b", "c")) == b"bad"
            assert "not this one" in str(bad.failure)
            assert await good.format(events("a")) == b"good"
            assert good.failure is None

    asyncio.run(run())


def test_death_and_delay_fail_the_streams_and_restart(tmp_path: Path) -> None:
    text = """
        import os
        def f(output):
            if output.input.input_text == "die":
                os._exit(3)
            while output.input.input_text == "loop":
                pass
            return "fine"
    """

    async def failure(formatter: Formatters, prompt: str) -> FailureKind:
        with pytest.raises(HandlerError) as raised:
            await formatter.open(prompt, {}).format(events("a"))
        return raised.value.kind

    async def run() -> None:
        async with running(tmp_path, text, predict_timeout_s=0.5) as formatter:
            for prompt, kind in (("die", FailureKind.CRASHED), ("loop", FailureKind.TIMEOUT)):
                assert await failure(formatter, prompt) is kind
                await eventually(lambda: formatter._process is None or formatter.num_failures)
                await eventually(lambda: formatter._process is not None, 30)
                body = await formatter.open("ok", {}).format(events("a", ends=True))
                assert body == b"fine"
            assert formatter.num_failures == 2

    asyncio.run(run())


def test_a_signature_of_another_length_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        with pytest.raises(ModelError, match="this one takes 3 arguments"):
            async with running(tmp_path, "def f(a, b, c): ..."):
                pass

    asyncio.run(run())


INPUT = """
    from djl_python import Input
    from djl_python.encode_decode import decode
    from djl_python.input_parser import input_formatter
    from djl_python.request_io import RequestInput, TextInput

    @input_formatter
    def read(item: Input, **kwargs) -> RequestInput:
        body = decode(item, item.get_property("content-type"))
        if "raise" in body:
            raise ValueError(body["raise"])
        request = TextInput()
        request.input_text = body.get("say", body)
        request.parameters = {"stream": True, "own": kwargs["configs"]["task"]}
        request.mine = item.get_as_string("q")
        return request
"""
BOTH = (
    INPUT
    + """
    def f(output):
        return f"{output.input.mine}/{output.input.input_text}/{output.finished};"
"""
)
BODY = """
    def read(decoded_payload, tokenizer=None):
        assert tokenizer is None
        return {"messages": [{"role": "user", "content": decoded_payload.pop("q")}]}
"""
ANNOTATED = """
    def read(payload: dict, *, configs) -> dict:
        return {"inputs": payload["q"] + configs["task"]}
"""


def request(body: bytes, **properties: str) -> HandlerRequest:
    return HandlerRequest(
        properties={"Content-Type": "application/json", **properties},
        content=[("q", "é".encode()), ("data", body)],
    )


@pytest.mark.parametrize(
    ("text", "body", "expected"),
    [
        (INPUT, {"say": "hé"}, {"inputs": "hé", "parameters": {"own": "t"}, "stream": True}),
        (INPUT, {"x": [1]}, {"inputs": {"x": [1]}, "parameters": {"own": "t"}, "stream": True}),
        (BODY, {"q": "hé"}, {"messages": [{"role": "user", "content": "hé"}]}),
        (ANNOTATED, {"q": "a"}, {"inputs": "at"}),
    ],
)
def test_bodies_that_input_formatters_make(
    tmp_path: Path, text: str, body: Any, expected: Any
) -> None:
    async def run() -> None:
        only_input = {"input_formatter": "read", "output_formatter": None}
        properties = {"properties": {"task": "t"}}
        async with running(tmp_path, text, **only_input, **properties) as formatters:
            assert formatters.reads_inputs
            async with formatters.read(request(json.dumps(body).encode())) as (made, _):
                assert json.loads(made) == expected

    asyncio.run(run())


def test_the_output_formatter_gets_what_the_input_formatter_returned(tmp_path: Path) -> None:
    async def run() -> None:
        fields = {"input_formatter": "read", "properties": {"task": "t"}}
        async with running(tmp_path, BOTH, **fields) as formatters:
            async with formatters.read(request(b'{"say": "hi"}')) as (_, number):
                stream = formatters.open("other", {}, number)
                assert await stream.format(events("a")) == "é/hi/False;".encode()
                assert await stream.format(events("b", ends=True)) == "é/hi/True;".encode()
            stream = formatters.open("later", {}, number)  # forgotten with its request
            await stream.format(events("a"))
            assert "no attribute 'mine'" in str(stream.failure)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "body", "message"),
    [
        (INPUT, b'{"raise": "not this"}', "^Custom formatter failed: not this$"),
        (INPUT, b"{", "^Custom formatter failed: Expecting property name"),
        ("def read(i): return 5", b"{}", "must return a TextInput or a dict, and returned <class"),
        ("def read(i): return {1: {2}}", b"{}", "not JSON serializable"),
        (
            "def read(i):\n  from djl_python.request_io import TextInput\n"
            "  return TextInput(input_ids=[1])",
            b"{}",
            "input_ids can't be used",
        ),
    ],
)
def test_an_input_formatter_that_fails(
    tmp_path: Path, text: str, body: bytes, message: str
) -> None:
    async def run() -> None:
        fields = {"input_formatter": "read", "output_formatter": None, "properties": {"task": "t"}}
        async with running(tmp_path, text, **fields) as formatters:
            with pytest.raises(UserError, match=message):
                async with formatters.read(request(body)):
                    pass
            assert not formatters.num_failures

    asyncio.run(run())


def test_an_input_formatter_that_ends_its_process(tmp_path: Path) -> None:
    text = "import os\ndef read(i): os._exit(3)"

    async def run() -> None:
        fields = {"input_formatter": "read", "output_formatter": None}
        async with running(tmp_path, text, **fields) as formatters:
            with pytest.raises(HandlerError, match="exit status 3"):
                async with formatters.read(request(b"{}")):
                    pass
            await eventually(lambda: formatters.num_failures == 1)

    asyncio.run(run())
