"""Copies that are reached over TCP, as those on other machines are: started here, without a cluster
to place them."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from lmi_core.copies.connection import Connection
from lmi_core.copies.copies import Copies
from lmi_core.copies.link import SealedLink
from lmi_core.copies.on_ray import CopyHost, RayLink, RayMachines, connect
from lmi_core.copies.process import CopyProcess, CopySettings
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, MissingExtraError, UserError
from lmi_core.settings.engine_config import EngineConfig
from tests.copies.test_copies import CONFIG
from tests.engine.harness import until

pytestmark = pytest.mark.timeout(120)
LONG = 200
"""Tokens of texts, of which a copy seldom has all before it is killed."""


class HereLink(SealedLink):
    """To a process of a ``CopyHost`` on this machine."""

    name = "127.0.0.1"

    def __init__(self, has_room: bool = True) -> None:
        super().__init__()
        self.host = CopyHost()
        self.has_room = has_room

    async def open(
        self, on_message: Callable[[Any], None], on_lost: Callable[[], None]
    ) -> Connection:
        if not self.has_room:
            await asyncio.Event().wait()
        host, port = await asyncio.to_thread(self.host.start, self.secret, "127.0.0.1")
        return await self.dial(host, port, on_message, on_lost)

    def kill(self) -> None:
        if self.host._process is not None:
            self.host._process.kill()

    async def ended(self) -> str:
        if self.host._process is None:
            return "never started"
        return f"status {await asyncio.to_thread(self.host.wait)}"


class OtherMachines:
    """Implements ``Machines``: every copy is here and is treated as if it weren't."""

    def __init__(self, address: str = "", room: int = 9) -> None:
        self.address = address
        self.room = room
        self.links: list[HereLink] = []

    def claim(self, config: EngineConfig, num_copies: int) -> bool:
        return False

    def release(self) -> None:
        pass

    def settings(
        self, config: EngineConfig, number: int, num_copies: int, *, is_first: bool
    ) -> CopySettings:
        return CopySettings(config=replace(config, num_threads=1), packs=True)

    def link(self, settings: CopySettings) -> HereLink:
        self.links.append(HereLink(len(self.links) < self.room))
        return self.links[-1]


def requests(num: int, length: int = 60) -> list[GenerationRequest]:
    params = SamplingParams(max_new_tokens=length, ignore_eos=True, temperature=1.0)
    return [
        GenerationRequest(
            request_id=str(i),
            prompt=f"Once upon a time, {i} people",
            params=replace(params, seed=i),
            max_queue_s=60.0,
        )
        for i in range(num)
    ]


async def text(copies: Copies, request: GenerationRequest) -> list[tuple[int, str]]:
    events: list[TokenEvent] = []
    async for batch in copies.generate_batches(request):
        events += batch
    assert len(events) == request.params.max_new_tokens
    assert 0 <= events[0].queue_seconds < 30
    return [(event.token_id, event.text) for event in events]


def test_a_copy_whose_end_is_never_heard_of_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class SilentLink(HereLink):
        async def ended(self) -> str:
            await asyncio.Event().wait()
            return ""

    async def main() -> None:
        settings = CopySettings(config=CONFIG)
        copy = CopyProcess(3, settings, lambda *_: None, lambda _: None, None, SilentLink())
        await copy.end()
        assert "copy 3 (127.0.0.1) doesn't end and is left" in caplog.text

    monkeypatch.setattr("lmi_core.copies.process._END_TIMEOUT_S", 0.02)
    asyncio.run(asyncio.wait_for(main(), 20))


def test_requests_of_a_lost_machine_go_on_elsewhere() -> None:
    async def main() -> None:
        machines = OtherMachines()
        async with Copies(CONFIG, 2, machines=machines) as copies:
            undisturbed = await asyncio.gather(*(text(copies, r) for r in requests(8, LONG)))
            for i in range(5):  # A copy can be through before it is killed.
                target = copies.num_tokens + 40
                disturbed = asyncio.gather(*(text(copies, r) for r in requests(8, LONG)))
                await until(lambda: copies.num_tokens > target)  # noqa: B023
                machines.links[i].kill()
                assert await disturbed == undisturbed
                await until(
                    lambda: len(machines.links) == 3 + i and len(copies.copies) == 2,  # noqa: B023
                    timeout_s=30,
                )
                if copies.num_resumed:
                    break
            assert copies.num_resumed > 0
            await copies.scale(1, 1)
            await until(lambda: len(copies.copies) == 1 and not copies._supervisor.is_scaling)
            assert await text(copies, requests(1, LONG)[0]) == undisturbed[0]
        ends = [link.host._process for link in machines.links]
        assert all(process is not None and process.returncode is not None for process in ends)

    asyncio.run(main())


def test_copies_that_find_no_room_are_given_up_when_fewer_are_wanted() -> None:
    async def main() -> None:
        machines = OtherMachines(room=2)
        async with Copies(CONFIG, 1, machines=machines) as copies:
            await copies.scale(4, 4)
            await until(lambda: len(machines.links) == 4 and len(copies.copies) == 2, timeout_s=30)
            assert copies._supervisor.is_scaling
            await copies.scale(2, 2)
            await until(lambda: not copies._supervisor.is_scaling, timeout_s=30)
            assert (len(copies.copies), len(copies._supervisor._places)) == (2, 2)
            await text(copies, requests(1)[0])

    asyncio.run(main())


class SlowMachines(OtherMachines):
    """Say late whether there is memory."""

    def __init__(self) -> None:
        super().__init__()
        self.says, self.num_claimed = threading.Event(), 0

    def claim(self, config: EngineConfig, num_copies: int) -> bool:
        assert self.says.wait(20)
        self.num_claimed = num_copies
        return False

    def release(self) -> None:
        self.num_claimed = 0


def test_memory_that_is_claimed_late_is_given_back() -> None:
    async def main() -> None:
        machines = SlowMachines()
        starting = asyncio.create_task(Copies(CONFIG, 2, machines=machines).__aenter__())
        await asyncio.sleep(0.02)
        starting.cancel()
        await asyncio.sleep(0.02)
        machines.says.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert machines.num_claimed == 0

    asyncio.run(main())


def test_copies_that_end_while_their_number_changes_leave_none_behind() -> None:
    async def main() -> None:
        machines = SlowMachines()
        machines.says.set()
        async with Copies(CONFIG, 1, machines=machines) as copies:
            machines.says.clear()
            scaling = asyncio.create_task(copies.scale(3, 3))
            await asyncio.sleep(0.02)
            asyncio.get_running_loop().call_later(0.02, machines.says.set)
        await asyncio.gather(scaling, return_exceptions=True)
        assert machines.num_claimed == 0
        assert not copies._supervisor._places
        assert all(link.host._process is None or link.host.wait() <= 0 for link in machines.links)
        with pytest.raises(EngineError, match="take no new requests"):
            await copies.scale(2, 2)

    asyncio.run(main())


class UnlikeMachines(OtherMachines):
    """The second has another processor."""

    def settings(
        self, config: EngineConfig, number: int, num_copies: int, *, is_first: bool
    ) -> CopySettings:
        level = "scalar" if number else ""
        return CopySettings(config=replace(config, num_threads=1, instruction_set=level))


def test_machines_that_would_change_bits_are_refused() -> None:
    async def main() -> None:
        with pytest.raises(EngineError, match=r"127.0.0.1 computes with scalar.*instruction_set"):
            async with Copies(CONFIG, 2, machines=UnlikeMachines()):
                pass

    asyncio.run(main())


def test_a_copy_ends_with_who_started_it() -> None:
    host = CopyHost()
    host.start(b"s" * 32, "127.0.0.1")
    assert host._process is not None
    assert host._process.stdin is not None
    assert host._process.stdout is not None
    assert host._process.stdout.read() == b""  # nobody is kept by a pipe that isn't read
    host._process.stdin.close()
    assert host.wait() == 0


def test_a_copy_that_is_not_there_is_named() -> None:
    async def main() -> None:
        with pytest.raises(EngineError, match=r"127.0.0.1:9 can't be reached"):
            await HereLink().dial("127.0.0.1", 9, print, print)

    asyncio.run(main())


def test_ray_is_asked_for_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"lmi-core\[ray\]"):
        connect("auto")


class FakeRay(ModuleType):
    """A cluster of nodes with so many cores."""

    def __init__(self, *num_cores: float) -> None:
        super().__init__("ray")
        self.__spec__ = ModuleSpec("ray", None)
        self.num_cores = num_cores

    def is_initialized(self) -> bool:
        return bool(self.num_cores)

    def nodes(self) -> list[dict[str, Any]]:
        head = {"Alive": True, "Resources": {"memory": 1.0}}
        lost = {"Alive": False, "Resources": {"CPU": 1.0}}
        return [head, lost] + [
            {"Alive": True, "Resources": {"CPU": number}} for number in self.num_cores
        ]

    def init(self, **_: object) -> None:
        raise ConnectionError("no cluster")


@pytest.mark.parametrize(
    ("num_cores", "num_copies", "degree", "num_threads", "num_models"),
    [
        ((8.0, 6.0), 2, 1, 6, 1),
        ((8.0, 6.0), 4, 1, 3, 2),
        ((8.0, 6.0), 2, 4, 1, 1),
        ((2.0, 2.0), 8, 1, 1, 4),
    ],
)
def test_copies_on_a_cluster_have_the_cores_of_the_smallest_node(
    monkeypatch: pytest.MonkeyPatch,
    num_cores: tuple[float, ...],
    num_copies: int,
    degree: int,
    num_threads: int,
    num_models: int,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay(*num_cores))
    machines = RayMachines("10.0.0.1:6379")
    asked = replace(CONFIG, num_threads=None, tensor_parallel_degree=degree)
    config = machines.settings(asked, 0, num_copies, is_first=True).config
    assert (config.num_threads, config.num_models) == (num_threads, num_models)
    later = machines.settings(asked, 0, 1, is_first=False).config
    assert later.num_threads == num_threads  # nothing is replaced where the number changes
    asked = replace(asked, num_threads=2)
    assert RayMachines().settings(asked, 0, 1, is_first=True).config.num_threads == 2


def test_a_cluster_that_answers_late_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(8.0)
    threads: list[threading.Thread] = []

    def nodes() -> list[dict[str, Any]]:
        threads.append(threading.current_thread())
        return FakeRay.nodes(ray)

    monkeypatch.setattr(ray, "nodes", nodes, raising=False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    copies = Copies(CONFIG, 2, machines=RayMachines())
    asyncio.run(copies.settings(0, is_first=True))
    assert threads
    assert threading.main_thread() not in threads


def test_room_that_is_reserved_late_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    groups: list[str] = []

    def placement_group(bundles: list[dict[str, float]], strategy: str) -> str:
        begun.set()
        assert goes_on.wait(20)
        groups.append("group")
        return groups[-1]

    groups_module, scheduling = ModuleType("placement_group"), ModuleType("scheduling")
    vars(groups_module).update(
        placement_group=placement_group, remove_placement_group=groups.remove
    )
    vars(scheduling).update(PlacementGroupSchedulingStrategy=None)
    monkeypatch.setitem(sys.modules, "ray.util", ModuleType("ray.util"))
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", groups_module)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", scheduling)

    async def main() -> None:
        link = RayLink(FakeRay(8.0), [{"CPU": 1}] * 2)
        copy = CopyProcess(0, CopySettings(config=CONFIG), print, print, None, link)
        starting = asyncio.create_task(copy.start())
        await asyncio.to_thread(begun.wait, 20)
        starting.cancel()
        await asyncio.sleep(0.02)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(main())  # waits for its threads
    assert groups == []


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("auto", "for this machine .no cluster.*ray start --head"),
        ("ray://head:10001", "at ray://head:10001 .an address is host:port"),
        ("head", "an address is host:port"),
        ("127.0.0.1:9", "at 127.0.0.1:9 .*refused"),
    ],
)
def test_a_cluster_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, address: str, why: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=why) as caught:
        connect(address)
    assert caught.value.field == "option.ray_address"
