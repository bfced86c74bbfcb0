"""Ranks that compute a model by torch: the answers of one process, and clear ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from asyncio import gather
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, ModelError
from lmi_core.sandbox import message
from lmi_core.settings.engine_config import EngineConfig
from tests.checkpoints import cached_checkpoint
from tests.engine.test_invariance import outcome
from tests.lora_adapters import cached_adapter
from tests.runners.test_ranked_features import lora_of
from tests.runners.test_ranks import REQUESTS, answers, assert_near, config_of

torch = pytest.importorskip("torch")

from lmi_core.runners.device import device_rank_process  # noqa: E402

pytestmark = pytest.mark.timeout(180)


def config(family: str, degree: int, **changes: object) -> EngineConfig:
    model = cached_checkpoint(family)
    return config_of(model, degree, device="torch-cpu", dtype="fp32", **changes)


def test_every_degree_gives_the_same_tokens() -> None:
    """Of experts, and of heads that are normed all together."""
    whole = answers(config("olmoe", 1), REQUESTS[:2])
    assert_near(answers(config("olmoe", 2), REQUESTS[:2]), whole)


def test_adapters_come_go_and_give_the_same_tokens_and_a_lost_rank_ends_requests() -> None:
    """In one engine, since starting ranks takes longest."""
    long = SamplingParams(max_new_tokens=400, ignore_eos=True, temperature=0)
    requests = [replace(REQUESTS[0], adapter=name) for name in ("", "a", "b")]
    whole = answers(config("llama3", 1, lora=lora_of("llama3")), requests)
    assert len(set(whole)) == 3

    async def main() -> None:
        async with Engine(config("llama3", 4, lora=lora_of("llama3"))) as engine:
            assert engine.info.runner.num_ranks == 4
            assert_near(list(await gather(*(outcome(engine, each) for each in requests))), whole)
            await engine.unload_adapter("a")
            await engine.load_adapter("c", cached_adapter("llama3", 1))
            assert_near([await outcome(engine, replace(requests[0], adapter="c"))], whole[1:2])
            with pytest.raises(ModelError, match="adapter_config"):
                await engine.load_adapter("x", Path(__file__).parent)
            assert engine._parts is not None
            process, *_ = engine._parts.runner._ranks._processes  # type: ignore[attr-defined]
            events = engine.generate((5, 6, 7), long)
            await anext(events)
            process.kill()
            with pytest.raises(EngineError):
                async for _ in events:
                    pass
            assert not engine.healthy

    asyncio.run(asyncio.wait_for(main(), 100))


class Gpu:
    """Of 1 GiB, of which so much is free; steps take nothing."""

    total_bytes = 1 << 30

    def __init__(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes

    def free_bytes(self) -> int:
        return self._free_bytes

    def allocated_bytes(self) -> int:
        return 0

    reserved_bytes = peak_bytes = start_peak = allocated_bytes


def blocks_of_rank_1(free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """That it says it could have, on a device with so much free; it has 5 then."""
    monkeypatch.setattr(device_rank_process, "memory_of", lambda _: Gpu(free_bytes))
    monkeypatch.setattr(device_rank_process, "TorchGroup", lambda *_: object())
    asked = config("llama3", 2, kv_cache_bytes=None, gpu_memory_utilization=0.9)
    model = device_rank_process._load(asked, None, 1, torch.device("cpu"))
    here, there = socket.socketpair()
    rank = device_rank_process._Rank(there, asked, 1, torch.device("cpu"), model)
    thread = threading.Thread(target=rank.by_torch, args=(Path("nowhere"),))
    thread.start()
    with here, there:
        here.settimeout(20)
        message.send(here, message.encode("measured"))
        said, num_blocks = device_rank_process._receive(here)
        message.send(here, message.encode(5))
        assert (said, device_rank_process._receive(here)) == ("blocks", ("ready",))
        here.shutdown(socket.SHUT_WR)
        thread.join(20)
    assert not thread.is_alive()
    return int(num_blocks)


def test_every_rank_says_what_its_own_device_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gpu_memory_utilization leaves of its own memory isn't the first rank's to know."""
    kept = (1 << 30) // 10
    few, many = (blocks_of_rank_1(kept + (share << 20), monkeypatch) for share in (100, 200))
    assert few == pytest.approx(many / 2, abs=1)
