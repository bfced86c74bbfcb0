"""Adapters in every copy, those that come after a loss included."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lmi_core.copies import adapters as module
from lmi_core.copies.adapters import SharedAdapters
from lmi_core.copies.copies import Copies
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import ModelError, UserError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import until
from tests.lora_adapters import cached_adapter

pytestmark = pytest.mark.timeout(120)


def request(adapter: str, number: int = 0) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{adapter}{number}",
        prompt_token_ids=tuple(range(10, 50)),
        params=SamplingParams(max_new_tokens=8, ignore_eos=True),
        adapter=adapter,
    )


async def tokens(source: Engine | Copies, one: GenerationRequest) -> list[int]:
    events: list[TokenEvent] = []
    async for batch in source.generate_batches(one):
        events += batch
    return [event.token_id for event in events]


@pytest.fixture(scope="module")
def adapters() -> tuple[Path, Path]:
    return cached_adapter("llama3", seed=1), cached_adapter("llama3", seed=2)


def test_every_copy_has_the_adapters_and_so_has_the_next_one(adapters: tuple[Path, Path]) -> None:
    first, second = adapters
    config = EngineConfig(
        model=cached_checkpoint("llama3"),
        num_threads=1,
        max_num_seqs=4,
        kv_cache_bytes=4 << 20,
        lora=LoraConfig(adapters=(("one", first),)),
    )

    async def main() -> None:
        async with Engine(config) as engine:
            await engine.load_adapter("two", second)
            expected = {name: await tokens(engine, request(name)) for name in ("", "one", "two")}
        assert len(set(map(tuple, expected.values()))) == 3
        async with Copies(config, 2) as copies:
            with pytest.raises(ModelError):
                await copies.load_adapter("bad", first.parent / "nowhere")
            await copies.load_adapter("two", second)
            assert list(copies.adapters) == ["one", "two"]
            lost = copies.copies[0]
            os.kill(lost.pid, signal.SIGKILL)
            await until(lambda: lost not in copies.copies and not copies.lacks_workers, 60)
            asked = [request(name, i) for name in expected for i in range(3)]
            answers = await asyncio.gather(*(tokens(copies, one) for one in asked))
            assert answers == [expected[one.adapter] for one in asked]
            await copies.unload_adapter("one")
            with pytest.raises(UserError, match="registered are two"):
                await tokens(copies, request("one"))
            await copies.load_adapter("one", second)
            assert await tokens(copies, request("one")) == expected["two"]

    asyncio.run(asyncio.wait_for(main(), 100))


class PlayedCopy:
    """Takes a turn of the loop to load an adapter, in which ``meanwhile`` happens."""

    def __init__(self, **adapters: Path) -> None:
        self.adapters = adapters
        self.meanwhile = lambda: None

    async def load_adapter(self, name: str, path: Path) -> None:
        await asyncio.sleep(0)
        self.meanwhile()
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[name]


def test_copies_that_come_meanwhile_have_the_same_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "adapter_digest", str)
    one, other = Path("/one"), Path("/other")

    async def main() -> None:
        adapters = SharedAdapters(LoraConfig(), outlast=False)
        first, second, third = PlayedCopy(), PlayedCopy(), PlayedCopy(x=other, y=one)
        copies: list[Any] = [first]
        first.meanwhile = lambda: copies.append(second)
        await adapters.load("x", one, lambda: copies)
        assert first.adapters == second.adapters == {"x": one}
        # One that started with what had the name before.
        await adapters.bring(third)  # type: ignore[arg-type]
        assert third.adapters == {"x": one}
        shared = adapters.find("x")
        assert shared is not None
        shared.acquire()
        leaving = asyncio.create_task(adapters.unload("x", lambda: copies))
        await asyncio.sleep(0)
        copies.append(third)
        shared.release()
        await leaving
        assert [copy.adapters for copy in (first, second, third)] == [{}, {}, {}]

    asyncio.run(main())
