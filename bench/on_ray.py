"""What clients see while a model is served on a Ray cluster whose nodes come and go.

    python -m bench.on_ray --streams 16 --tokens 100

A cluster of so many nodes on this machine (Ray's own utility for that), a server with copies by
load, and streams without end. In turn: the load comes, and copies with it; a node that has one is
killed; another version of the model takes the place of the first; the load goes. Every answer is
compared with the one that its seed got from an undisturbed copy of either version.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.server_process import started
from lmi_core.demo import MODEL_DIR

OPTIONS = {
    "num_threads": 1,
    "max_rolling_batch_size": 4,
    "max_model_len": 512,
    "maxWorkers": 4,
    "max_idle_time": 15,
}


@dataclass
class Seen:
    """By the clients, since the last line."""

    outcomes: Counter[str] = field(default_factory=Counter)
    longest_pause_s: float = 0.0
    since_s: float = field(default_factory=time.monotonic)


@dataclass
class Session:
    http: aiohttp.ClientSession
    num_tokens: int
    texts: dict[str, dict[int, str]] = field(default_factory=dict)
    """Of each version by seed."""
    seen: Seen = field(default_factory=Seen)

    async def ask(self, seed: int) -> str:
        """The text, or what went wrong; notes the longest time without a token."""
        parameters = {
            "max_new_tokens": self.num_tokens,
            "do_sample": True,
            "seed": seed,
            "ignore_eos_token": True,
        }
        body = {"inputs": f"Once upon a time, {seed} people", "parameters": parameters}
        last_s, last = time.monotonic(), b"{}"
        try:
            async with self.http.post("/invocations", json={**body, "stream": True}) as answer:
                if answer.status != 200:
                    return f"status {answer.status}"
                async for line in answer.content:
                    now_s = time.monotonic()
                    pause_s = now_s - last_s
                    self.seen.longest_pause_s = max(self.seen.longest_pause_s, pause_s)
                    last_s, last = now_s, line
        except aiohttp.ClientError as error:
            return f"{type(error).__name__}"
        return str(json.loads(last).get("generated_text", last[:80]))

    async def client(self, seed: int) -> None:
        while True:
            text = await self.ask(seed)
            versions = [name for name, texts in self.texts.items() if texts[seed] == text]
            self.seen.outcomes["/".join(versions) or f"other ({text[:40]!r})"] += 1

    async def learn(self, version: str, num_streams: int) -> None:
        texts = await asyncio.gather(*map(self.ask, range(num_streams)))
        self.texts[version] = dict(enumerate(texts))

    async def num_copies(self) -> int:
        async with self.http.get("/models/model") as answer:
            [described] = await answer.json(content_type=None)
        [group] = described["models"][0]["workerGroups"]
        return len(group["workers"])

    async def until(self, num_copies: int) -> None:
        while await self.num_copies() != num_copies:  # noqa: ASYNC110
            await asyncio.sleep(0.2)

    async def register(self, url: Path) -> None:
        query = {"url": str(url), "model_name": "model", "replace": "true"}
        async with self.http.post("/models", params=query) as answer:
            print(" ", (await answer.text()).strip().replace("\n", " "))

    async def say(self, what: str) -> None:
        seen, self.seen = self.seen, Seen()
        answers = ", ".join(f"{number} as {kind}" for kind, number in seen.outcomes.items())
        print(
            f"{what}: {time.monotonic() - seen.since_s:.1f} s, {await self.num_copies()} copies; "
            f"answers: {answers or 'none'}; longest pause {seen.longest_pause_s:.1f} s; load "
            f"averages {', '.join(f'{one:.1f}' for one in os.getloadavg())}",
            flush=True,
        )


def version(store: Path, name: str, dtype: str) -> Path:
    """The embedded model, computed with one dtype or another."""
    directory = store / name / "model"
    shutil.copytree(MODEL_DIR, directory)
    (directory / "serving.properties").write_text(f"option.dtype={dtype}\n")
    return directory


async def play(arguments: argparse.Namespace, cluster: Any, port: int, versions: Any) -> None:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    base = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession(base, timeout=timeout, connector=connector) as http:
        session = Session(http, arguments.tokens)
        # In reverse, so that the first version serves afterwards; one copy each.
        for name in ("second", "first"):
            await session.register(versions[name])
            await session.learn(name, arguments.streams)
        await session.until(1)
        await session.say("deployed")
        clients = [asyncio.create_task(session.client(i)) for i in range(arguments.streams)]
        await session.until(4)
        await session.say("load comes")
        await asyncio.sleep(arguments.phase_s)
        await session.say("undisturbed")
        await asyncio.to_thread(cluster.remove_node, node_with_a_copy(cluster), False)
        await asyncio.sleep(1)
        await session.until(4)
        await session.say("a node is killed, until there are as many copies again")
        await asyncio.sleep(arguments.phase_s)
        await session.say("undisturbed")
        await session.register(versions["second"])
        await asyncio.sleep(arguments.phase_s)
        await session.until(4)
        await session.say("another version is rolled out")
        await asyncio.sleep(arguments.phase_s)
        await session.say("undisturbed")
        for client in clients:
            client.cancel()
        await session.until(1)
        await session.say("load goes")


def node_with_a_copy(cluster: Any) -> Any:
    from ray.util import placement_group_table

    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    taken = {node_id for group in groups for node_id in group["bundles_to_node_id"].values()}
    return next(node for node in cluster.worker_nodes if node.node_id in taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--phase-s", type=float, default=10.0)
    arguments = parser.parse_args()
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    with tempfile.TemporaryDirectory() as store:
        try:
            for _ in range(arguments.nodes):
                cluster.add_node(num_cpus=1)
            cluster.wait_for_nodes()
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
            versions = {
                "first": version(Path(store), "first", "bf16"),
                "second": version(Path(store), "second", "fp32"),
            }
            command = [sys.executable, "-m", "lmi_core", "serve", str(versions["first"])]
            command += ["--on", "ray", "--ray-address", cluster.address, "--model-store", store]
            for key, value in OPTIONS.items():
                command += ["--option", f"{key}={value}"]
            with started(command) as server:
                print(f"ready after {server.start_s:.1f} s")
                asyncio.run(play(arguments, cluster, server.port, versions))
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main()
