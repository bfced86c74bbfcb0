"""What a refusal costs: the server's processor time for a request that there is no room for.

    python -m bench.refusals                    beside a bare route of the HTTP library
    python -m bench.refusals --pairs 9 --requests 5000 --json

Both servers are processes of their own, asked in turn over kept connections; the bare one answers
the same bytes by a route without a middleware. The time counted is theirs, from ``/proc``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
from contextlib import ExitStack

from aiohttp import web

from bench.front_end import TickingEngine
from bench.server_process import ServerProcess, cpu_ns, started
from lmi_server.http.lifecycle import run_server
from lmi_server.http.metrics import Metrics
from lmi_server.http.options import ServerOptions
from lmi_server.models.model import recipe_of_engine
from lmi_server.models.model_registry import ModelRegistry

_BODY = b'{"model": "model", "prompt": "Once upon a time", "max_tokens": 64}'
_HEAD = (
    b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
_PATHS = ("/v1/completions", "/generate", "/v1/messages")
_CONNECTIONS = 8


def ask(server: ServerProcess, path: str, count: int) -> float:
    """Microseconds of the server's processor time for each of ``count`` refused requests."""
    request = _HEAD % (path.encode(), len(_BODY)) + _BODY
    with ExitStack() as stack:
        address = ("127.0.0.1", server.port)
        clients = [
            stack.enter_context(socket.create_connection(address)) for _ in range(_CONNECTIONS)
        ]
        begin_ns = cpu_ns(server.pid)
        for _ in range(count // _CONNECTIONS):
            for client in clients:
                client.sendall(request)
            for client in clients:
                answer = client.recv(65536)
                assert answer.split(b" ", 2)[1] in (b"429", b"503", b"529"), answer
        return (cpu_ns(server.pid) - begin_ns) / 1000 / (count // _CONNECTIONS * _CONNECTIONS)


def measure(path: str, pairs: int, count: int) -> dict[str, object]:
    """Medians of runs that alternate, and of the ratios of neighbours."""
    with ExitStack() as stack:
        command = (sys.executable, "-m", "bench.refusals", "--serve")
        ours = stack.enter_context(started((*command, "lmi")))
        bare = stack.enter_context(started((*command, "bare")))
        for server in (ours, bare):
            ask(server, path, count // 4)
        runs = [(ask(ours, path, count), ask(bare, path, count)) for _ in range(pairs)]
    ratios = [one / other for one, other in runs]
    return {
        "path": path,
        "lmi_us": round(statistics.median(one for one, _ in runs), 1),
        "bare_us": round(statistics.median(other for _, other in runs), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(min(ratios), 2), round(max(ratios), 2)],
    }


def serve_full(host: str, port: int) -> None:
    """The server, with no place for anybody."""
    options = ServerOptions(host=host, port=port, max_in_flight=0)
    models = ModelRegistry(options, Metrics(), [recipe_of_engine(TickingEngine(0.0), options)])
    asyncio.run(run_server(models, announce=lambda _: None))


def serve_bare(host: str, port: int) -> None:
    """The HTTP library alone, with what it takes to say the same."""
    body = json.dumps({"error": {"message": "0 requests are being served, which is the limit"}})

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(
            status=429, text=body, content_type="application/json", headers={"Retry-After": "1"}
        )

    async def ping(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/ping", ping)
    for path in _PATHS:
        app.router.add_post(path, refuse)
    web.run_app(app, host=host, port=port, print=None, access_log=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--paths", nargs="+", default=list(_PATHS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--json", action="store_true", help="one object a row")
    parser.add_argument("--serve", choices=("lmi", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        (serve_full if args.serve == "lmi" else serve_bare)(args.host, args.port)
        return
    for path in args.paths:
        figures = measure(path, args.pairs, args.requests)
        if args.json:
            print(json.dumps(figures), flush=True)
        else:
            print(
                f"{path:<20} {figures['lmi_us']} us, bare {figures['bare_us']} us: "
                f"{figures['ratio']}x {figures['ratios']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
