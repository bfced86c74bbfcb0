"""Output formatters in a real process, in each of their signatures."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lmi_core.config.handler_config import HandlerConfig
from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.errors import ModelError
from lmi_core.handlers.errors import FailureKind, HandlerError
from lmi_core.handlers.formatter import OutputFormatter
from tests.server.harness import eventually


@asynccontextmanager
async def running(directory: Path, text: str, **fields: Any) -> AsyncIterator[OutputFormatter]:
    path = directory / "model.py"
    path.write_text(textwrap.dedent(text))
    config = HandlerConfig(path=path, model_dir=directory, output_formatter="f", **fields)
    formatter = OutputFormatter(config)
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

    async def failure(formatter: OutputFormatter, prompt: str) -> FailureKind:
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
