"""Whether recorded requests are answered the same, to the bit, under a load they never saw.

    nice python -m bench.receipts --requests 1000

The embedded model answers random requests, a few at once, in a server that records them. Then one
with KV memory for a few of them gets them again by ``lmi replay``, in another order and many at
once, among others that come and are cut off by chance. Prints what replay says, and how much was
preempted and found in the prefix cache meanwhile. Exit code 1 when an answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.copies import say
from bench.server_process import ServerProcess, started
from bench.soak import WORDS
from bench.startup import SERVE
from lmi_core.bench.stream import COMPLETIONS, ask
from lmi_core.http_url import HttpUrl
from lmi_core.top import read

_MAX_LEN = 1024


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def body(rng: random.Random, prefixes: list[str]) -> dict[str, Any]:
    """A request for OpenAI's completions; half of them begin with one of ``prefixes``."""
    sampled = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1}
    prompt = rng.choice([*prefixes, *[""] * len(prefixes)]) + text(rng, rng.randint(1, 80))
    return {
        **COMPLETIONS.body(prompt, rng.choice([1, 16, 100, 300])),
        "ignore_eos": rng.random() < 0.5,
        "n": rng.choice([1, 1, 1, 2]),
        **rng.choice([{"temperature": 0}, {"temperature": 0.7}, sampled]),
    }


def url_of(server: ServerProcess) -> HttpUrl:
    return HttpUrl.parse(f"http://127.0.0.1:{server.port}")


async def record(url: HttpUrl, bodies: list[dict[str, Any]]) -> None:
    left = list(reversed(bodies))

    async def ask_next() -> None:
        while left:
            await ask(url, COMPLETIONS, left.pop())

    await asyncio.gather(*(ask_next() for _ in range(4)))


async def disturb(url: HttpUrl, rng: random.Random, prefixes: list[str]) -> None:
    """Requests one after the other, of which some are left at once or in their midst."""
    while True:
        leaves_after = rng.choice([None, None, 1, 20])
        await ask(url, COMPLETIONS, body(rng, prefixes), abort_after=leaves_after)
        await asyncio.sleep(rng.expovariate(10.0))


async def replay(url: HttpUrl, directory: Path, args: argparse.Namespace) -> int:
    rng = random.Random(args.seed + 1)
    prefixes = [text(rng, 100) for _ in range(4)]
    others = [asyncio.create_task(disturb(url, rng, prefixes)) for _ in range(args.others)]
    command = ["-m", "lmi_core", "replay", str(directory), "--url", str(url)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, "--parallel", str(args.parallel), "--seed", str(args.seed)
    )
    code = await process.wait()
    for other in others:
        if other.done():
            other.result()  # it failed
        other.cancel()
    return code


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--requests", type=int, default=1000)
    add("--parallel", type=int, default=32, help="of the replay")
    add("--others", type=int, default=8, help="that disturb it")
    add("--kv-cache-bytes", default="4M", help="of the replay")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    prefixes = [text(rng, rng.randint(30, 200)) + " " for _ in range(8)]
    bodies = [body(rng, prefixes) for _ in range(args.requests)]
    options = ["--option", f"max_model_len={_MAX_LEN}", "--option", "max_rolling_batch_size=64"]
    options += ["--log-level", "warning"]
    with tempfile.TemporaryDirectory() as directory:
        with started([*SERVE, *options, "--record", directory]) as server:
            asyncio.run(record(url_of(server), bodies))
        small = ["--option", f"kv_cache_bytes={args.kv_cache_bytes}"]
        with started([*SERVE, *options, *small]) as server:
            code = asyncio.run(replay(url_of(server), Path(directory), args))
            now = read(url_of(server))
    names = ("preemptions", "cached_prompt_tokens", "prompt_tokens", "generated_tokens")
    counts = [now.get(f"lmi_{name}_total", model_name="model") for name in names]
    say("{:g} preemptions; {:g} of {:g} prompt tokens from the cache; {:g} tokens".format(*counts))
    sys.exit(code)


if __name__ == "__main__":
    main()
