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
from typing import Any

from lmi_core.bench.figures import percentile
from lmi_core.bench.stream import LMI, RefusedError, ask, head
from lmi_core.http_url import HttpUrl

TEXT = "the fox went to a castle by the sea and told its friend about three small red boats"
WORDS = TEXT.split()


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
        self.url = HttpUrl.parse(args.url)
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
            except (OSError, TimeoutError, ValueError) as error:
                self.tally.fail(f"{type(error).__name__}: {error}")

    async def request(self) -> None:
        abort_after = None
        if self.rng.random() < self.args.abort:
            abort_after = self.rng.randint(0, self.args.max_new_tokens - 1)
        tally = self.tally
        try:
            answer = await ask(self.url, LMI, self.body(), abort_after=abort_after)
        except RefusedError as error:
            if error.status != 503:
                tally.fail(str(error))
                return
            tally.refused += 1
            wait_s = error.retry_after_s if self.args.honours_retry_after else None
            if wait_s is None:
                wait_s = self.rng.random()
            # Whoever waits past the end would only lengthen the time that completions count for.
            await asyncio.sleep(min(wait_s, max(0.0, self.until - time.perf_counter())))
            return
        tally.tokens += answer.num_tokens
        tally.interval_s += answer.intervals_s
        if answer.num_tokens:
            tally.first_token_s.append(answer.first_at - answer.sent_at)
        if answer.was_aborted:
            tally.aborted += 1
        else:
            tally.completed += 1

    def body(self) -> dict[str, Any]:
        num_words = self.rng.randint(1, 2 * self.args.prompt_words)
        text = " ".join(self.rng.choices(WORDS, k=num_words))
        body = LMI.body(text, self.args.max_new_tokens)
        body["parameters"]["do_sample"] = True
        return body

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
        reader, writer = await asyncio.open_connection(self.url.host, self.url.port)
        writer.write(head("GET", self.url, "/metrics"))
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
    parser.add_argument(
        "--honours-retry-after",
        action="store_true",
        help="who is refused waits as long as the answer says; else less than a second",
    )
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
