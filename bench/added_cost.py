"""What something that can be left off costs: the server's processor time a token, with and without.

    python -m bench.added_cost traces --shape 160m
    python -m bench.added_cost prefixes --shape 160m --streams 32

``traces``: spans of every call, sent by OTLP to a collector in this process. ``prefixes``: KV
blocks written behind (``prefix_cache_dir``). Both servers run all the time and get the same streams
of new prompts in turn, which one first changing; prints the median of the pairs' ratios. Only
processor time is counted, all threads', which other load of the machine disturbs less than rates.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.checkpoints import SHAPES, checkpoint
from bench.copies import say
from bench.server_process import ServerProcess, started
from lmi_core.bench.stream import LMI, ask
from lmi_core.http_url import HttpUrl

_NUM_WORDS = 1000
"""Each of which is about four tokens of the benchmarks' tokenizer."""


class _Collector(http.server.ThreadingHTTPServer):
    num_bytes = 0


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        assert isinstance(self.server, _Collector)
        self.server.num_bytes += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def traces() -> Iterator[list[str]]:
    """Flags of a server whose calls a collector gets, which has to have got some at the end."""
    with _Collector(("127.0.0.1", 0), _Handler) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield ["--otlp-endpoint", f"http://127.0.0.1:{collector.server_port}/v1/traces"]
        finally:
            collector.shutdown()
            thread.join()
        assert collector.num_bytes, "no spans came"


@contextmanager
def prefixes() -> Iterator[list[str]]:
    """Flags of a server that keeps prefixes in a directory, which is removed at the end. It is on
    the drive that has the checkout, where /tmp may be memory."""
    parent = Path(__file__).parents[1] / "build"
    parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix="prefixes-") as directory:
        yield ["--option", f"prefix_cache_dir={directory}"]


KINDS = {"traces": traces, "prefixes": prefixes}


def process_s(pid: int) -> float:
    """Processor time of a process, with that of threads that have ended."""
    return time.clock_gettime(~pid << 3 | 2)  # the kernel's name of that process's clock


async def stream_all(server: ServerProcess, texts: list[str], num_new: int) -> int:
    url = HttpUrl.parse(f"http://127.0.0.1:{server.port}")
    answers = await asyncio.gather(*(ask(url, LMI, LMI.body(text, num_new)) for text in texts))
    return sum(answer.num_tokens for answer in answers)


def us_per_token(server: ServerProcess, args: argparse.Namespace, seed: int) -> float:
    rng = random.Random(seed)
    texts = [
        " ".join(f"w{rng.randrange(_NUM_WORDS)}" for _ in range(args.prompt_words))
        for _ in range(args.streams)
    ]
    before_s = process_s(server.pid)
    num_tokens = asyncio.run(stream_all(server, texts, args.new_tokens))
    # What is left to do behind the last answer: spans leave once a second.
    time.sleep(args.rest)
    return 1e6 * (process_s(server.pid) - before_s) / num_tokens


def measure(args: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "lmi_core", "serve", str(checkpoint(args.shape))]
    command += ["--device", "cpu", "--option", f"max_rolling_batch_size={args.streams}"]
    command += ["--option", "max_model_len=2048", *args.flags]
    with ExitStack() as stack:
        flags = stack.enter_context(KINDS[args.what]())
        servers = [stack.enter_context(started(each)) for each in ([*command, *flags], command)]
        for server in servers:
            us_per_token(server, args, seed=-1)
        pairs = []
        for i in range(args.pairs):
            costs = {j: us_per_token(servers[j], args, seed=i) for j in ((0, 1), (1, 0))[i % 2]}
            pairs.append((costs[0], costs[1]))
            if args.json:
                print(json.dumps(pairs[-1]), flush=True)
    ratios = sorted(with_it / without for with_it, without in pairs)
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    with_it, without = (statistics.median(each) for each in zip(*pairs, strict=True))
    say(
        f"{args.what}, {args.shape}, {args.streams} streams: {with_it:.1f} us a token with, "
        f"{without:.1f} without; {statistics.median(ratios):.4f}x "
        f"({quartiles[0]:.4f} to {quartiles[2]:.4f}, {len(pairs)} pairs)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("what", choices=KINDS)
    add("flags", nargs="*", help="of both servers")
    add("--shape", default="160m", choices=sorted(SHAPES))
    add("--streams", type=int, default=64)
    add("--prompt-words", type=int, default=8)
    add("--new-tokens", type=int, default=32)
    add("--pairs", type=int, default=15)
    add("--rest", type=float, default=1.2, help="seconds to wait for what is done behind")
    add("--json", action="store_true", help="also print each pair")
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
