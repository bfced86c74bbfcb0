"""Copies on a Ray cluster of several nodes on this machine: placed, lost with a node, scaled."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from lmi_core.copies.copies import Copies
from lmi_core.copies.on_ray import RayMachines, connect
from lmi_core.errors import UserError
from tests.copies.test_copies import CONFIG
from tests.copies.test_other_machines import requests, text
from tests.engine.harness import until
from tests.server.harness import eventually, serving_models
from tests.server.models.test_copies import registry_of, texts

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def nodes() -> Iterator[Any]:
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_lost_node_costs_no_request(nodes: Any) -> None:
    workers = [nodes.add_node(num_cpus=2) for _ in range(3)]
    nodes.wait_for_nodes()
    machines = RayMachines(nodes.address)

    async def main() -> None:
        async with Copies(CONFIG, 2, machines=machines) as copies:
            undisturbed = await asyncio.gather(*(text(copies, r) for r in requests(8)))
            num_tokens = copies.num_tokens
            disturbed = asyncio.gather(*(text(copies, r) for r in requests(8)))
            await until(lambda: copies.num_tokens > num_tokens + 40)
            used = [node for node in ray.nodes() if node["Resources"].get("CPU")]
            assert len(used) == 3
            for worker in workers[:2]:
                await asyncio.to_thread(nodes.remove_node, worker, False)
            assert await disturbed == undisturbed
            await until(lambda: len(copies.copies) >= 1, timeout_s=60)
            assert await text(copies, requests(1)[0]) == undisturbed[0]

    asyncio.run(main())


def test_ranks_are_placed_together(nodes: Any) -> None:
    nodes.add_node(num_cpus=1)
    nodes.add_node(num_cpus=2)
    nodes.wait_for_nodes()
    machines = RayMachines(nodes.address)
    config = replace(CONFIG, tensor_parallel_degree=2)

    async def main() -> None:
        async with Copies(config, 1, machines=machines) as copies:
            assert copies.info.runner.num_threads == 1
            await text(copies, requests(1)[0])

    asyncio.run(main())


def test_a_copy_sees_the_gpus_that_are_its_own(nodes: Any) -> None:
    """Of a node that says to have some."""
    nodes.add_node(num_cpus=8)
    nodes.add_node(num_cpus=8, num_gpus=4)
    nodes.wait_for_nodes()
    machines = RayMachines(nodes.address)
    config = replace(CONFIG, device="cuda", tensor_parallel_degree=2, num_threads=None)
    settings = machines.settings(config, 0, 2, is_first=True)
    assert settings.config.num_threads == 2  # of each rank
    assert machines.link(settings)._bundles == [{"CPU": 4, "GPU": 2}]

    async def visible(link: Any) -> set[str]:
        connection = await link.open(lambda _: None, lambda: None)
        connection.close()
        told = link._actor.__ray_call__.remote(lambda _: os.environ["CUDA_VISIBLE_DEVICES"])
        return set((await told).split(","))

    async def main() -> None:
        links = [machines.link(settings) for _ in range(2)]
        seen = [await visible(link) for link in links]
        assert seen[0] | seen[1] == {"0", "1", "2", "3"}
        assert len(seen[0]) == len(seen[1]) == 2
        await eventually(lambda: not ray.available_resources().get("GPU"), 30)
        for link in links:
            link.kill()
        await eventually(lambda: ray.available_resources().get("GPU") == 4.0, 30)

    asyncio.run(asyncio.wait_for(main(), 100))


def test_serving_on_a_cluster(nodes: Any) -> None:
    nodes.add_node(num_cpus=2)
    nodes.wait_for_nodes()

    async def main() -> None:
        models = registry_of("on=ray", f"ray_address={nodes.address}", "num_threads=1")
        async with models, serving_models(models) as served:
            copies = served.models.sole.loaded.backend
            first = await texts(served)
            assert (await served.ask("PUT", "/models/model?min_worker=2")).status == 200
            await eventually(lambda: len(copies.copies) == 2, 60)
            assert await texts(served) == first
        await eventually(lambda: ray.available_resources().get("CPU") == 2.0, 30)

    asyncio.run(asyncio.wait_for(main(), 200))
    with pytest.raises(UserError, match="a server is of one cluster"):
        connect("10.0.0.1:6379")


def test_a_cluster_that_is_gone_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    address = cluster.address
    cluster.shutdown()
    started_s = time.monotonic()
    for written in (address, "auto"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UserError, match=f"no Ray cluster is found at {address}"):
            connect(written)
    assert time.monotonic() - started_s < 60
