"""What the server itself costs: streamed tokens per second of its processor time, with no model.

    python -m bench.front_end                     64 and 512 connections, ticking and unthrottled
    python -m bench.front_end --connections 64 --seconds 20 --json

A scripted engine gives every open request one token a tick, each of them a frame of its own, and
the load comes from a process of its own. The time counted is the server's (user and system), from
``/proc``, so other processes disturb the figure little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path

from bench.server_process import cpu_ns, started
from lmi_core.demo import MODEL_DIR
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stream import EventStream
from lmi_server.http.lifecycle import run_server
from lmi_server.http.metrics import Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.model import recipe_of_engine
from lmi_server.models.model_registry import ModelRegistry

TICKS_S = (0.005, 0.0)
CONNECTIONS = (64, 512)
TOKENS_PER_REQUEST = 1000
_FIRST_TOKEN_ID = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """One row: what the server did in its own processor time."""

    connections: int
    tick_ms: float
    """Between two tokens of a connection; 0: as fast as they are taken."""
    tokens: int
    seconds: float
    server_cpu_s: float
    tokens_per_cpu_s: int
    failed: int


class TickingEngine(Engine):
    """The demo model's tokenizer and limits, with scripted tokens in place of the model."""

    def __init__(self, tick_s: float) -> None:
        super().__init__(MODEL_DIR)
        self._tick_s = tick_s
        self._open: dict[EventStream, Iterator[TokenEvent]] = {}
        self._ticker: asyncio.Task[None] | None = None

    async def subscribe(
        self, request: GenerationRequest, notify: Callable[[], None]
    ) -> EventStream:
        """One event a tick, handed over as the real engine does."""
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())
        stream = EventStream(notify)
        stream.abort = self._forget
        self._open[stream] = self._events(request)
        return stream

    def _forget(self, stream: EventStream) -> None:
        self._open.pop(stream, None)

    async def _tick(self) -> None:
        next_s = time.monotonic()
        while True:
            next_s = max(next_s + self._tick_s, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())
            for stream, events in list(self._open.items()):
                event = next(events)
                stream.put(event)
                if event.finish_reason is not None:
                    stream.finish()
                    del self._open[stream]
                stream.notify()

    def _events(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        num_tokens = request.params.max_new_tokens or 1
        ids = cycle(range(_FIRST_TOKEN_ID, self.tokenizer.num_tokens))
        for number in range(1, num_tokens + 1):
            token_id = next(ids)
            yield TokenEvent(
                request_id=request.request_id,
                choice=0,
                token_id=token_id,
                text=self.tokenizer.token_text(token_id),
                num_prompt_tokens=8,
                num_generated_tokens=number,
                finish_reason=FinishReason.LENGTH if number == num_tokens else None,
            )


def measure(connections: int, tick_s: float, seconds: float) -> FrontEnd:
    """Start a server on the scripted engine and load it."""
    serve = (sys.executable, "-m", "bench.front_end", "--serve", "--tick-ms", f"{1000 * tick_s:g}")
    load = (sys.executable, str(Path(__file__).with_name("serving.py")), "--json")
    with started(serve) as server:
        begin_ns = cpu_ns(server.pid)
        out = subprocess.check_output(
            [
                *load,
                f"--url=http://127.0.0.1:{server.port}",
                f"--concurrency={connections}",
                f"--seconds={seconds:g}",
                f"--max-new-tokens={TOKENS_PER_REQUEST}",
            ]
        )
        used_s = (cpu_ns(server.pid) - begin_ns) * 1e-9
    figures = json.loads(out)
    return FrontEnd(
        connections=connections,
        tick_ms=1000 * tick_s,
        tokens=figures["tokens"],
        seconds=figures["seconds"],
        server_cpu_s=round(used_s, 2),
        tokens_per_cpu_s=round(figures["tokens"] / used_s),
        failed=figures["failed"],
    )


def serve(host: str, port: int, tick_s: float) -> None:
    """Run the server on the scripted engine until a signal."""
    options = ServerOptions(host=host, port=port, max_in_flight=4096)
    engine = TickingEngine(tick_s)
    models = ModelRegistry(options, Metrics(), [recipe_of_engine(engine, options)])
    asyncio.run(run_server(models, announce=lambda _: None))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--connections", type=int, nargs="+", default=list(CONNECTIONS))
    parser.add_argument("--tick-ms", type=float, nargs="+", default=[1000 * s for s in TICKS_S])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", action="store_true", help="one object a row")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.host, args.port, args.tick_ms[0] / 1000)
        return
    if not args.json:
        print("| connections | tick | tokens/s | server CPU | tokens per CPU second | failed |")
        print("|---|---|---|---|---|---|")
    for tick_ms in args.tick_ms:
        for connections in args.connections:
            figures = measure(connections, tick_ms / 1000, args.seconds)
            print(json.dumps(asdict(figures)) if args.json else row(figures), flush=True)


def row(figures: FrontEnd) -> str:
    """One row under the header that ``main`` prints."""
    tick = f"{figures.tick_ms:g} ms" if figures.tick_ms else "unthrottled"
    return (
        f"| {figures.connections} | {tick} | {figures.tokens / figures.seconds:.0f} | "
        f"{figures.server_cpu_s / figures.seconds:.0%} | {figures.tokens_per_cpu_s} | "
        f"{figures.failed} |"
    )


if __name__ == "__main__":
    main()
