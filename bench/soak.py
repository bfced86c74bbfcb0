"""Mixed traffic for a long time, with bodies among it that want to take the server for themselves.

    nice python -m bench.soak --minutes 60

Serves the built-in model in a process of its own. A line a minute says what the server holds (MB of
memory resident in it and in its children, file descriptors, threads, KV blocks in use), how many
requests were answered, refused and failed, and the 99th percentile of the time that short requests
took meanwhile. Exit code 1 when a short request failed, or blocks are in use at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from bench.server_process import started
from bench.startup import SERVE
from lmi_core.bench.figures import percentile
from lmi_core.demo import MODEL_DIR

TEXT = "the fox went to a castle by the sea and told its friend about three small boats"
WORDS = TEXT.split()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_TIMEOUT_S = 180.0
_NUM_SHORT, _NUM_STREAMS = 4, 4
_METRIC = "lmi_kv_blocks{"


def _completion(**fields: Any) -> bytes:
    return json.dumps({"model": "model", "prompt": "a fox", "max_tokens": 8, **fields}).encode()


def _chat(num_messages: int, content: str) -> bytes:
    message = {"role": "user", "content": content}
    return json.dumps({"messages": [message] * num_messages, "max_tokens": 4}).encode()


COMPLETIONS, CHAT, INVOCATIONS = "/v1/completions", "/v1/chat/completions", "/invocations"
HOSTILE: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "stop string of 4M": (COMPLETIONS, lambda: _completion(stop="x" * 4_000_000), 1),
    "10^6 stop strings": (COMPLETIONS, lambda: _completion(stop=["ab"] * 1_000_000), 1),
    "prompt of 6 MB": (COMPLETIONS, lambda: _completion(prompt="fox " * 1_500_000), 1),
    "prompt of 30 MB": (COMPLETIONS, lambda: _completion(prompt="a b c " * 5_000_000), 1),
    "1000 prompts x 128": (COMPLETIONS, lambda: _completion(prompt=["x"] * 1000, n=128), 1),
    "(a{1000}){1000}": (COMPLETIONS, lambda: _completion(guided_regex="(a{1000}){1000}"), 1),
    "(a{100}){100}": (
        COMPLETIONS,
        lambda: _completion(guided_regex="(a{100}){100}", max_tokens=200),
        4,
    ),
    "20,000 choices": (
        COMPLETIONS,
        lambda: _completion(guided_choice=[f"choice {i}" for i in range(20_000)]),
        1,
    ),
    "9000 properties": (
        COMPLETIONS,
        lambda: _completion(
            guided_json={"properties": {f"k{i}": {"type": "string"} for i in range(9000)}}
        ),
        1,
    ),
    "six chats of 33 MB": (CHAT, lambda: _chat(33, "word " * 200_000), 6),
    "10^6 messages": (CHAT, lambda: _chat(1_000_000, "x"), 1),
    "60,000 names": (
        INVOCATIONS,
        lambda: json.dumps({f"name {i}": i for i in range(60_000)}).encode(),
        1,
    ),
    "tokenize 8 MB": ("/tokenize", lambda: json.dumps({"prompt": "fox " * 2_000_000}).encode(), 1),
    "detokenize 10^6": ("/detokenize", lambda: json.dumps({"tokens": [9] * 1_000_000}).encode(), 1),
    "deep": (INVOCATIONS, lambda: b'{"inputs":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}", 1),
    "lists of 30 MB": (INVOCATIONS, lambda: b'{"inputs":[' + b"[]," * 10_000_000 + b"1]}", 1),
}


class Soak:
    """All clients of one run."""

    def __init__(self, url: str, session: aiohttp.ClientSession, *, seed: int = 1) -> None:
        self.url = url
        self.session = session
        self.rng = random.Random(seed)
        self.seconds: list[float] = []
        """Of short requests, since the last line."""
        self.counts: Counter[str] = Counter()
        self.slowest_hostile = ("", 0.0)

    def text(self, most: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, most)))

    async def short(self) -> None:
        """Requests whose time is measured, of every kind that is common."""
        bodies: Iterator[tuple[str, Callable[[], Any]]] = itertools.cycle(
            [
                (COMPLETIONS, lambda: {"prompt": self.text(12), "max_tokens": 8}),
                (INVOCATIONS, lambda: {"inputs": self.text(12), "parameters": {"max_tokens": 8}}),
                ("/generate", lambda: {"inputs": self.text(8)}),
                (CHAT, lambda: {"messages": [{"role": "user", "content": self.text(9)}]}),
                (COMPLETIONS, lambda: {"prompt": "A", "max_tokens": 16, "guided_json": SCHEMA}),
                ("/tokenize", lambda: {"prompt": self.text(12)}),
            ]
        )
        for path, make in bodies:
            body = {"model": "model", "max_tokens": 8, **make()}
            begin = time.perf_counter()
            try:
                async with self.session.post(self.url + path, json=body) as answer:
                    await answer.read()
                    status = str(answer.status)
            except (aiohttp.ClientError, TimeoutError) as error:
                status = type(error).__name__
            self.seconds.append(time.perf_counter() - begin)
            self.counts["short" if status == "200" else f"short: {status}"] += 1
            await asyncio.sleep(0.02)

    async def streams(self) -> None:
        """Long answers, some of which nobody waits for."""
        while True:
            body = {"prompt": self.text(60), "max_tokens": 120, "temperature": 1, "stream": True}
            num_lines = self.rng.choice((5, 10_000))
            try:
                async with self.session.post(self.url + COMPLETIONS, json=body) as answer:
                    async for _ in answer.content:
                        if (num_lines := num_lines - 1) < 0:
                            break
                self.counts["streams"] += 1
            except (aiohttp.ClientError, TimeoutError) as error:
                self.counts[f"stream: {type(error).__name__}"] += 1
            await asyncio.sleep(0.1)

    async def hostile(self) -> None:
        """One kind after the other, each as often at once as it says."""
        while True:
            for name, (path, make, number) in HOSTILE.items():
                body = await asyncio.to_thread(make)
                begin = time.perf_counter()
                statuses = await asyncio.gather(*(self.send(path, body) for _ in range(number)))
                took_s = time.perf_counter() - begin
                self.slowest_hostile = max(self.slowest_hostile, (name, took_s), key=lambda x: x[1])
                for status in statuses:
                    self.counts[f"hostile {status}"] += 1
                await asyncio.sleep(1)

    async def send(self, path: str, body: bytes) -> str:
        headers = {"Content-Type": "application/json"}
        try:
            data = io.BytesIO(body)  # it is sent in pieces
            async with self.session.post(self.url + path, data=data, headers=headers) as answer:
                await answer.read()
                return str(answer.status)
        except (aiohttp.ClientError, TimeoutError) as error:
            return type(error).__name__

    async def used_blocks(self) -> int:
        async with self.session.get(self.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return int(
            sum(float(x.split()[-1]) for x in lines if x.startswith(_METRIC) and '"used"' in x)
        )


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() * 1e-6


def children_mb(pid: int) -> float:
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread or a child that has just ended
            for child in (task / "children").read_text().split():
                total += resident_mb(int(child))
    return total


def held(pid: int) -> str:
    num_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    num_threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    return (
        f"{resident_mb(pid):7.1f} MB, children {children_mb(pid):6.1f} MB, {num_files:3d} files, "
        f"{num_threads:3d} threads"
    )


async def soak(url: str, pid: int, minutes: float, *, with_hostile: bool) -> int:
    """The process's exit code."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        run = Soak(url, session)
        tasks = [asyncio.create_task(run.short()) for _ in range(_NUM_SHORT)]
        tasks += [asyncio.create_task(run.streams()) for _ in range(_NUM_STREAMS)]
        tasks += [asyncio.create_task(run.hostile())] if with_hostile else []
        end = time.monotonic() + 60 * minutes
        minute = 0
        while time.monotonic() < end:
            await asyncio.sleep(min(60.0, max(0.0, end - time.monotonic())))
            minute += 1
            seconds, run.seconds = run.seconds, []
            slowest, took_s = run.slowest_hostile
            p50, p99 = (percentile(seconds, share) * 1000 for share in (0.5, 0.99))
            print(
                f"{minute:3d} min: {held(pid)}, {await run.used_blocks():4d} blocks; short: "
                f"{len(seconds)}, p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {max(seconds):.2f} s; "
                f"slowest hostile: {slowest} {took_s:.1f} s",
                flush=True,
            )
            run.slowest_hostile = ("", 0.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.sleep(2)
        run.session = session
        num_blocks = await run.used_blocks()
    print(f"at the end: {held(pid)}, {num_blocks} blocks in use; {dict(run.counts)}")
    is_bad = num_blocks or any(name.startswith("short: ") for name in run.counts)
    return 1 if is_bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--mild", action="store_true", help="without hostile bodies")
    args = parser.parse_args()
    with started([*SERVE, str(MODEL_DIR)]) as server:
        url = f"http://127.0.0.1:{server.port}"
        return asyncio.run(soak(url, server.pid, args.minutes, with_hostile=not args.mild))


if __name__ == "__main__":
    sys.exit(main())
