"""Copies on the nodes of a Ray cluster.

Ray finds each a place, for all of its ranks on one node, starts it there and says when its node is
gone. Requests and events go straight between this process and the copy's (``sealed.py``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmi_core.copies.connection import Connection
from lmi_core.copies.link import Link, SealedLink, to_the_end
from lmi_core.copies.process import CopySettings, log_level
from lmi_core.errors import EngineError, MissingExtraError, UserError
from lmi_core.settings.engine_config import EngineConfig

log = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]
_BOOT = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from lmi_core.copies.child import listen; sys.exit(listen(sys.argv[2]))"
)
_REACH_S, _CONNECT_S = 5.0, 45.0
_SAY_S = 10.0
_PLACE_S = 600.0
"""In which there must be room for a copy: a cluster may have to start a node first."""
_STOP_S = 10.0
_FIELD = "option.ray_address"
_connecting = threading.Lock()
_connected: list[str] = []
"""The address of the cluster to which this process belongs."""


class RayMachines:
    """Implements ``Machines``: the nodes of a cluster, each copy on one of them."""

    def __init__(self, address: str = "auto") -> None:
        """Ray runs in this process from here on; blocking. ``address``: of the cluster's head;
        auto: of the cluster of which this machine is a node. Raises MissingExtraError without Ray,
        UserError where there is no cluster."""
        self._ray = connect(address)
        self._num_threads = 0

    def claim(self, config: EngineConfig, num_copies: int) -> bool:
        return False  # each looks at what its node has, and packs its weights there

    def release(self) -> None:
        pass

    def settings(
        self, config: EngineConfig, number: int, num_copies: int, *, is_first: bool
    ) -> CopySettings:
        """Of all copies alike, however many there are later: a node may have no room for one that
        starts before another ends, and more copies may mean more nodes."""
        if config.device == "cuda":
            self._num_threads = self._num_threads or config.num_threads or self._beside(config)
            num_each = max(1, self._num_threads // config.tensor_parallel_degree)
            config = replace(config, num_threads=num_each)
            return CopySettings(config=config, log_level=log_level())
        num_cores = [int(num) for node in self._nodes() if (num := node["Resources"].get("CPU"))]
        num_each = -(-num_copies // max(1, len(num_cores)))
        if not self._num_threads:
            num_ranks = num_each * config.tensor_parallel_degree
            least = min(num_cores, default=1)
            self._num_threads = config.num_threads or max(1, least // num_ranks)
        config = replace(
            config,
            num_models=config.num_models * num_each,
            num_threads=self._num_threads,
            bound_cpus=None,
        )
        return CopySettings(config=config, packs=True, log_level=log_level())

    def _beside(self, config: EngineConfig) -> int:
        """The cores of a copy that are beside its GPUs, on the node that has the fewest."""
        nodes = [node["Resources"] for node in self._nodes() if node["Resources"].get("GPU")]
        degree = config.tensor_parallel_degree
        return max(
            1, min((int(one.get("CPU", 1) * degree // one["GPU"]) for one in nodes), default=1)
        )

    def link(self, settings: CopySettings) -> Link:
        config = settings.config
        num_threads, degree = self._num_threads, config.tensor_parallel_degree
        assert num_threads, "settings come first"
        if config.device == "cuda":  # an actor sees those of its own bundle
            return RayLink(self._ray, [{"CPU": num_threads, "GPU": degree}])
        return RayLink(self._ray, [{"CPU": num_threads}] * degree)

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]


def connect(address: str) -> Any:
    """Make this process one of the cluster's, in bounded time, and return Ray."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError("option.on=ray", "ray") from None
    with _connecting:
        if not ray.is_initialized():
            _connected[:] = [address]
            _reach(address)
            _init(ray, address)
        elif _connected and _connected != [address]:
            raise UserError(
                f"option.ray_address={address}: a server is of one cluster, and this one is of "
                f"that at {_connected[0]}",
                field=_FIELD,
            )
    return ray


def _reach(address: str) -> None:
    """Ray tries for a long time."""
    named = os.environ.get("RAY_ADDRESS") or "auto" if address == "auto" else address
    if named == "auto":
        return
    host, separator, port = named.rpartition(":")
    if not separator or "//" in host or not port.isdecimal():
        raise _no_cluster(named, "an address is host:port of the head, as 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(named, error) from None


def _init(ray: Any, address: str) -> None:
    """In a thread, where Ray leaves the server's signals alone and can be left to itself."""
    failures: list[BaseException] = []

    def init() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=init, daemon=True, name="ray init")
    thread.start()
    thread.join(_CONNECT_S)
    if thread.is_alive():
        raise _no_cluster(address, f"it hasn't answered for {_CONNECT_S:.0f} s")
    if failures:
        raise _no_cluster(address, failures[0]) from failures[0]


def _no_cluster(address: str, why: object) -> UserError:
    where = "for this machine" if address == "auto" else f"at {address}"
    return UserError(
        f"option.on=ray, but no Ray cluster is found {where} ({why}): make this machine a node "
        "(ray start --head, or ray start --address=host:port), or write its head's "
        "option.ray_address",
        field=_FIELD,
    )


class RayLink(SealedLink):
    """Implements ``Link``: to a process beside an actor, which has the cores or GPUs of all its
    ranks."""

    def __init__(self, ray: Any, bundles: list[dict[str, int]]) -> None:
        """``bundles``: what Ray reserves on one node, of which the actor has the first."""
        super().__init__()
        self._ray = ray
        self._bundles = bundles
        self._group: Any = None
        self._actor: Any = None
        self._host = ""

    @property
    def name(self) -> str:
        return f"a process on {self._host or 'no node yet'}"

    async def open(
        self, on_message: Callable[[Any], None], on_lost: Callable[[], None]
    ) -> Connection:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        await to_the_end(self._reserve)
        await self._placed()
        actor = self._ray.remote(CopyHost)
        self._actor = actor.options(
            num_cpus=self._bundles[0]["CPU"],
            num_gpus=self._bundles[0].get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=0
            ),
            max_concurrency=3,
        ).remote()
        try:
            self._host, port = await self._actor.start.remote(self.secret)
        except self._ray.exceptions.RayError as error:
            raise EngineError(f"a copy can't be started: {error}") from None
        log.info("a copy was placed on %s", self._host)
        return await self.dial(self._host, port, on_message, on_lost)

    def _reserve(self) -> None:
        from ray.util.placement_group import placement_group

        self._group = placement_group(self._bundles, strategy="STRICT_PACK")

    async def _placed(self) -> None:
        ready = asyncio.wrap_future(self._group.ready().future())
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())
        each = ", ".join(f"{number} {what}" for what, number in self._bundles[0].items())
        wanted = f"{len(self._bundles)} x {each} on one node"
        try:
            done, _ = await asyncio.wait([ready], timeout=_SAY_S)
            if not done:
                log.warning("the cluster has no room for a copy (%s) yet", wanted)
            async with asyncio.timeout(_PLACE_S - _SAY_S):
                await ready
        except TimeoutError:
            raise EngineError(
                f"the cluster has had no room for a copy ({wanted}) for {_PLACE_S:.0f} s: set "
                "option.num_threads or option.num_copies lower, or add nodes"
            ) from None

    def kill(self) -> None:
        actor, group, self._group = self._actor, self._group, None
        if group is not None:
            asyncio.get_running_loop().run_in_executor(None, self._give_back, actor, group)

    def _give_back(self, actor: Any, group: Any) -> None:
        from ray.util.placement_group import remove_placement_group

        if actor is not None:
            with suppress(Exception):  # the node is gone, or the cluster
                self._ray.kill(actor, no_restart=True)
        with suppress(Exception):
            remove_placement_group(group)

    async def ended(self) -> str:
        if self._actor is None:
            return "never started"
        try:
            code = await self._actor.wait.remote()
        except self._ray.exceptions.RayError:
            return f"its node, {self._host}, or its place there is gone"
        return f"exit status {code}" if code >= 0 else f"signal {-code}"


class CopyHost:
    """The actor: starts a copy's process on its node, which ends with the actor."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, secret: bytes, host: str = "") -> tuple[str, int]:
        """Where it listens for who has the secret; ``host``: empty: the node's address."""
        if not host:
            import ray

            host = ray.util.get_node_ip_address()
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(_ROOT), host],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(secret)
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the copy ended with status {process.wait(_STOP_S)}")
        return host, int(line)

    def wait(self) -> int:
        """For its end."""
        assert self._process is not None
        with self._process as process:
            return process.wait()
