"""A peer that needs no installation and reports the timings it is told to.

``python -m tests.bench.fake_peer MODEL ...`` is its driver; ``... --port N`` its server.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench.peers.driver import Generate, Load, drive
from bench.peers.install import Home, InstallError
from bench.peers.load import COMPLETIONS
from bench.peers.peer import Peer
from bench.peers.process import Command
from bench.peers.side import HttpSide, LineSide, Side
from bench.peers.work import Timing


def side(model: Path) -> Side:
    arguments = [sys.executable, "-m", "tests.bench.fake_peer", str(model)]
    numbers = ["--dtype", "bf16", "--threads", "1", "--max-num-seqs", "32"]
    return LineSide(Command([*arguments, *numbers], model / "engine.log"))


def server(model: Path) -> Side:
    def command(port: int) -> Command:
        arguments = [sys.executable, "-m", "tests.bench.fake_peer", str(model), "--port", str(port)]
        return Command(arguments, model / "server.log")

    return HttpSide(command, COMPLETIONS)


def write_model(directory: Path, **behaviour: Any) -> Path:
    """``token_s``: seconds per token; ``error``: said, not timings; ``short``: tokens too few;
    ``dies_at``: number of the call that kills it; ``no_start``: it doesn't come up."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "behaviour.json").write_text(json.dumps({"token_s": 0.01} | behaviour))
    return directory


class FakePeer(Peer):
    name = "fake"
    formats = {"bf16": "fake-bf16"}
    requirements = ("fake==1",)

    def __init__(self, homes: Path, *, serves: bool = True, **behaviour: Any) -> None:
        super().__init__(homes)
        self.serves = serves
        self.behaviour = behaviour
        self.num_installs = 0
        self.num_conversions = 0

    def install_steps(self, home: Home) -> None:
        self.num_installs += 1
        home.run(sys.executable, "-c", self.behaviour.get("install", "print('installed')"))

    def convert(self, checkpoint: Path, dtype: str, target: Path) -> None:
        self.num_conversions += 1
        if "convert_error" in self.behaviour:
            raise InstallError(self.behaviour["convert_error"])
        write_model(target, **self.behaviour)

    def engine_side(self, load: Load) -> Side:
        return side(load.model)

    def server_side(self, load: Load) -> Side | None:
        return server(load.model) if self.serves else None


def open_engine(load: Load) -> tuple[Generate, dict[str, Any]]:
    behaviour = json.loads((load.model / "behaviour.json").read_text())
    if behaviour.get("no_start"):
        sys.exit("no such model")
    calls = iter(range(1, 1 << 30))

    def generate(prompts: list[list[int]], num_new: int) -> list[Timing]:
        print("noise on standard output", flush=True)
        if next(calls) == behaviour.get("dies_at"):
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(9)
        if "error" in behaviour:
            raise ValueError(behaviour["error"])
        token_s = behaviour["token_s"]
        first_s = token_s * len(prompts[0])
        count = num_new - behaviour.get("short", 0)
        last_s = first_s + token_s * (num_new - 1)
        return [Timing(first_s, last_s, count)] * len(prompts)

    return generate, {"version": "1", "prompt": "any"}


class Handler(BaseHTTPRequestHandler):
    """Streams completions as fast as it can, two tokens to a frame."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if behaviour.get("status"):
            self.send_error(behaviour["status"])
            return
        self.send_response(200)
        self.end_headers()
        assert len(body["prompt"]) in (16, 128)
        for _ in range(body["max_tokens"] // 2):
            self.wfile.write(b'data: {"choices": [{"text": " a b"}]}\n\n')
        count = body["max_tokens"] - behaviour.get("short", 0)
        usage = json.dumps({"choices": [], "usage": {"completion_tokens": count}})
        self.wfile.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *arguments: object) -> None:
        """Silent."""


if __name__ == "__main__":
    if sys.argv[2] == "--port":
        behaviour = json.loads((Path(sys.argv[1]) / "behaviour.json").read_text())
        ThreadingHTTPServer.request_queue_size = 64
        ThreadingHTTPServer(("127.0.0.1", int(sys.argv[3])), Handler).serve_forever()
    drive(open_engine)
