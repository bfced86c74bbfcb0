"""An engine over the fake runner, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.text.tokenizer import Tokenizer
from tests.engine.fake_runner import VOCAB_SIZE, FakeRunner

T = TypeVar("T")
EOS_ID = 250
"""Special; ids 251 to 255 are too."""


def run(coroutine: Coroutine[Any, Any, T], timeout_s: float = 100.0) -> T:
    """Run a test's coroutine in a fresh event loop."""

    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, timeout_s)

    return asyncio.run(bounded())


def byte_tokenizer() -> Tokenizer:
    """256 tokens: 250 bytes in the order of their byte-level characters, then six special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB_SIZE - 6]
    vocabulary = {char: i for i, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([f"<s{i}>" for i in range(6)])
    return Tokenizer(backend, {})


def make_engine(
    runner: FakeRunner | None = None,
    *,
    own_loop: bool = False,
    eos_ids: tuple[int, ...] = (EOS_ID,),
    observer: Any = None,
    **config: Any,
) -> Engine:
    return Engine(
        EngineConfig(model=Path("fake"), **config),
        runner=runner or FakeRunner(),
        tokenizer=byte_tokenizer(),
        eos_token_ids=eos_ids,
        own_loop=own_loop,
        observer=observer,
        check_integrity=True,
    )


async def collect(engine: Engine, *args: Any, **kwargs: Any) -> list[TokenEvent]:
    return [event async for event in engine.generate(*args, **kwargs)]


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for something that other tasks bring about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (the engine has no event for what tests look at)
            await asyncio.sleep(0.001)


def token_ids(events: list[TokenEvent], choice: int = 0) -> list[int]:
    return [event.token_id for event in events if event.choice == choice and event.prompt is None]


def text(events: list[TokenEvent], choice: int = 0) -> str:
    return "".join(event.text for event in events if event.choice == choice)


async def assert_nothing_leaked(engine: Engine) -> None:
    """After the step in flight, if any, nothing runs or waits and no block is in use."""
    await until(lambda: not engine.stats().num_running)
    stats = engine.stats()
    assert stats.num_waiting == 0
    assert stats.num_used_blocks == 0
    assert stats.num_cached_blocks + stats.num_free_blocks == stats.num_blocks
