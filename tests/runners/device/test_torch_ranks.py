"""Ranks that compute a model by torch: the answers of one process, and clear ends."""

from __future__ import annotations

import asyncio
import socket
import threading
from asyncio import gather
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lmi_core.adapters.store import LoraStore
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, ModelError
from lmi_core.ops.kernels import select
from lmi_core.runners.cpu import ranks
from lmi_core.sandbox import message
from lmi_core.settings.engine_config import EngineConfig
from tests.checkpoints import cached_checkpoint
from tests.engine.test_invariance import Request, outcome
from tests.lora_adapters import cached_adapter
from tests.runners.test_ranked_features import lora_of
from tests.runners.test_ranks import REQUESTS, answers, assert_near, config_of

torch = pytest.importorskip("torch")

from lmi_core.runners.device import device_rank_process  # noqa: E402
from lmi_core.runners.device.device_ranks import DeviceRanks  # noqa: E402

pytestmark = pytest.mark.timeout(180)


def config(family: str, degree: int, **changes: object) -> EngineConfig:
    model = cached_checkpoint(family)
    return config_of(model, degree, device="torch-cpu", dtype="fp32", **changes)


def test_every_degree_gives_the_same_tokens() -> None:
    """Of experts, and of heads that are normed all together."""
    whole = answers(config("olmoe", 1), REQUESTS[:2])
    assert_near(answers(config("olmoe", 2), REQUESTS[:2]), whole)


def test_adapters_come_go_and_give_the_same_tokens_and_a_lost_rank_ends_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one engine, since starting ranks takes longest."""
    long = SamplingParams(max_new_tokens=400, ignore_eos=True, temperature=0)
    requests = [replace(REQUESTS[0], adapter=name) for name in ("", "a", "b")]
    whole = answers(config("llama3", 1, lora=lora_of("llama3")), requests)
    assert len(set(whole)) == 3

    async def main() -> None:
        async with Engine(config("llama3", 4, lora=lora_of("llama3"))) as engine:
            assert engine.info.runner.num_ranks == 4
            assert_near(list(await gather(*(outcome(engine, each) for each in requests))), whole)
            senders = sending_threads(monkeypatch)
            await engine.unload_adapter("a")
            await engine.load_adapter("c", cached_adapter("llama3", 1))
            assert_near([await outcome(engine, replace(requests[0], adapter="c"))], whole[1:2])
            with pytest.raises(ModelError, match="adapter_config"):
                await engine.load_adapter("x", Path(__file__).parent)
            assert senders
            assert threading.current_thread() not in senders
            assert engine._parts is not None
            await fails_alone(engine, engine._parts.runner)
            assert_near([await outcome(engine, requests[0])], whole[:1])
            assert torch.get_num_threads() == 1
            process, *_ = engine._parts.runner._ranks._processes  # type: ignore[attr-defined]
            events = engine.generate((5, 6, 7), long)
            await anext(events)
            process.kill()
            with pytest.raises(EngineError):
                async for _ in events:
                    pass
            assert not engine.healthy

    asyncio.run(asyncio.wait_for(main(), 100))


def sending_threads(monkeypatch: pytest.MonkeyPatch) -> set[threading.Thread]:
    """Those that tell other ranks something from now on: it may take them as long as it likes."""
    senders: set[threading.Thread] = set()
    send = ranks.message.send

    def note(*arguments: Any) -> None:
        senders.add(threading.current_thread())
        send(*arguments)

    monkeypatch.setattr(ranks.message, "send", note)
    return senders


async def fails_alone(engine: Engine, runner: Any) -> None:
    """A request whose graph there is no memory for ends, and no rank with it."""

    def no_memory() -> None:
        raise torch.OutOfMemoryError("no room")

    record, runner._record_with_states = runner._record_with_states, no_memory
    search = SamplingParams(max_new_tokens=3, penalty_alpha=0.6, top_k=2)
    with pytest.raises(EngineError, match="no room"):
        await outcome(engine, Request((5, 6, 7), search))
    runner._record_with_states = record
    assert engine.healthy
    assert len(await outcome(engine, Request((5, 6, 7), search))) == 3


def test_what_ends_ranks_while_they_load_is_raised_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lmi_core.runners.cpu.ranks._BOOT", "import sys; sys.stdin.read()")
    others = DeviceRanks(config("llama3", 2), None)
    others._watch_all()
    others._processes[0].kill()
    why = others._loss.result(20)
    assert why.startswith("rank 1 of 2 ended")
    assert not caplog.records
    others._loss = Future()
    others._has_loaded()
    others.lose(why)
    assert f"{why}: the model's steps fail from now on" in caplog.text
    others.close()


def test_adapters_are_packed_on_the_device_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    class Store:
        def pack(self, path: Path) -> SimpleNamespace:
            return SimpleNamespace(num_bytes=len(entered))

    monkeypatch.setattr(torch.cuda, "device", current)
    here, there = socket.socketpair()
    with here, there:
        second = torch.device("cuda", 1)
        store = cast(LoraStore, Store())
        orders = device_rank_process._Orders(there, store, second)
        orders.take("ask", 7, "pack_adapter", (0, Path(), ()))
        here.settimeout(20)
        assert device_rank_process._receive(here) == ("done", 7, 1)
    assert entered == [second]


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
    chosen, taken = dict.fromkeys(select.IMPLEMENTATIONS, "torch"), []
    record = device_rank_process.record_eager

    def note(model: Any, chosen: Any, *rest: Any) -> Any:
        taken.append(chosen)
        return record(model, chosen, *rest)

    monkeypatch.setattr(device_rank_process, "record_eager", note)
    asked = config("llama3", 2, kv_cache_bytes=None, gpu_memory_utilization=0.9)
    model = device_rank_process._load(asked, None, 1, torch.device("cpu"))
    here, there = socket.socketpair()
    rank = device_rank_process._Rank(there, asked, 1, torch.device("cpu"), model)
    thread = threading.Thread(target=rank.by_torch, args=("nowhere", chosen))
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
    assert taken == [chosen]
    return int(num_blocks)


def test_every_rank_says_what_its_own_device_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gpu_memory_utilization leaves of its own memory isn't the first rank's to know."""
    kept = (1 << 30) // 10
    few, many = (blocks_of_rank_1(kept + (share << 20), monkeypatch) for share in (100, 200))
    assert few == pytest.approx(many / 2, abs=1)
