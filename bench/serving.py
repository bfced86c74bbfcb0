"""Load on a running server: N streams at once for T seconds, some of them cut off by the client.

    python bench/serving.py --url http://127.0.0.1:8080 --concurrency 500 --seconds 60 --abort 0.3

Runs in a process of its own and prints one line of figures (``--json``: an object). Afterwards it
asks the server whether anything is left of the requests. Exit code 1 when a request failed in any
other way than being refused with 503 or cut off by us, or when KV blocks are still in use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

TEXT = "the fox went to a castle by the sea and told its friend about three small red boats"
WORDS = TEXT.split()
TOKEN = b'{"token"'


@dataclass
class Tally:
    completed: int = 0
    aborted: int = 0
    refused: int = 0
    failed: int = 0
    tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    interval_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        self.failed += 1
        if len(self.failures) < 5:
            self.failures.append(what[:200])


class Load:
    """``concurrency`` clients that send one request after the other until the time is over."""

    def __init__(self, args: argparse.Namespace) -> None:
        url = urlsplit(args.url)
        self.host, self.port = url.hostname or "127.0.0.1", url.port or 80
        self.args = args
        self.tally = Tally()
        self.rng = random.Random(args.seed)

    async def run(self) -> float:
        """Seconds it took."""
        started = time.perf_counter()
        self.until = started + self.args.seconds
        await asyncio.gather(*(self.client() for _ in range(self.args.concurrency)))
        return time.perf_counter() - started

    async def client(self) -> None:
        while time.perf_counter() < self.until:
            try:
                async with asyncio.timeout(self.args.timeout):
                    await self.request()
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                self.tally.fail(f"{type(error).__name__}: {error}")

    async def request(self) -> None:
        abort_after = None
        if self.rng.random() < self.args.abort:
            abort_after = self.rng.randint(0, self.args.max_new_tokens - 1)
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            started = time.perf_counter()
            writer.write(self.message())
            head = await reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
            if status == 503:
                self.tally.refused += 1
                writer.close()
                await asyncio.sleep(self.rng.random())
            elif status != 200:
                self.tally.fail((await reader.read(500)).decode(errors="replace"))
            else:
                await self.read_stream(reader, writer, started, abort_after)
        finally:
            writer.close()

    async def read_stream(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        started: float,
        abort_after: int | None,
    ) -> None:
        num_tokens = 0
        last = started
        tail = b""
        while data := await reader.read(65536):
            now = time.perf_counter()
            num_new = (tail[-len(TOKEN) + 1 :] + data).count(TOKEN)
            tail = (tail + data)[-200:]
            if num_new:
                if not num_tokens:
                    self.tally.first_token_s.append(now - started)
                else:
                    self.tally.interval_s += [(now - last) / num_new] * num_new
                last = now
                num_tokens += num_new
                self.tally.tokens += num_new
            if abort_after is not None and num_tokens >= abort_after:
                self.tally.aborted += 1
                writer.transport.abort()
                return
        if tail.endswith(b"0\r\n\r\n") and b'"error"' not in tail:
            self.tally.completed += 1
        else:
            self.tally.fail(f"cut off after {num_tokens} tokens: {tail!r}")

    def message(self) -> bytes:
        num_words = self.rng.randint(1, 2 * self.args.prompt_words)
        body = {
            "inputs": " ".join(self.rng.choices(WORDS, k=num_words)),
            "parameters": {
                "max_new_tokens": self.args.max_new_tokens,
                "ignore_eos_token": True,
                "do_sample": True,
            },
            "stream": True,
        }
        data = json.dumps(body).encode()
        head = (
            f"POST /invocations HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        return head.encode() + data

    async def leftovers(self) -> dict[str, float]:
        """What the server's metrics say is still there, once it had a moment to notice."""
        values: dict[str, float] = {}
        for _ in range(50):
            values = await self.metrics()
            if not any(values.values()):
                break
            await asyncio.sleep(0.1)
        return values

    async def metrics(self) -> dict[str, float]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        wanted = {
            "running": "lmi_running_sequences{",
            "waiting": "lmi_waiting_requests{",
            "used blocks": "lmi_kv_blocks{",
        }
        values = dict.fromkeys(wanted, 0.0)
        for line in text.splitlines():
            for name, prefix in wanted.items():
                if line.startswith(prefix) and ("state=" not in line or 'state="used"' in line):
                    values[name] = float(line.rsplit(" ", 1)[1])
        return values


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def report(tally: Tally, seconds: float, leftovers: dict[str, float]) -> dict[str, object]:
    return {
        "seconds": round(seconds, 1),
        "completed": tally.completed,
        "aborted": tally.aborted,
        "refused": tally.refused,
        "failed": tally.failed,
        "tokens": tally.tokens,
        "tokens_per_s": round(tally.tokens / seconds, 1),
        "ttft_p50_ms": round(1000 * percentile(tally.first_token_s, 0.50), 1),
        "ttft_p99_ms": round(1000 * percentile(tally.first_token_s, 0.99), 1),
        "itl_p50_ms": round(1000 * percentile(tally.interval_s, 0.50), 2),
        "itl_p99_ms": round(1000 * percentile(tally.interval_s, 0.99), 2),
        "left_over": leftovers,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--abort", type=float, default=0.0, help="share of requests cut off by us")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--prompt-words", type=int, default=32, help="on average")
    parser.add_argument("--timeout", type=float, default=120.0, help="of one request, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    load = Load(parser.parse_args())

    async def run() -> dict[str, object]:
        seconds = await load.run()
        return report(load.tally, seconds, await load.leftovers())

    figures = asyncio.run(run())
    if load.args.json:
        print(json.dumps(figures))
    else:
        print("  ".join(f"{name}={value}" for name, value in figures.items()))
    for failure in load.tally.failures:
        print(f"failed: {failure}", file=sys.stderr)
    left_over = figures["left_over"]
    assert isinstance(left_over, dict)
    return 1 if load.tally.failed or any(left_over.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
