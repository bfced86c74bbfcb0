"""A side of a pair: an engine's process that does a piece of work and says how long it took."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any, Protocol

from bench.peers.load import Api, is_ready, local, wave
from bench.peers.process import Command, EngineProcess, SideError
from bench.peers.work import Figure, Timing, Work, figure_of, make_prompts, text_of
from lmi_core.bench.stream import RefusedError

START_S = 300.0
WORK_S = 120.0


class Side(Protocol):
    about: dict[str, Any]
    """How it runs ("over": driver, http or a tool's name) and what it says of itself."""

    def start(self) -> None:
        """Return when it can take work; raises SideError."""

    def measure(self, work: Work, seed: int) -> Figure:
        """Do the work once, on the prompts of ``seed``. Raises SideError; the next call then starts
        the process again."""

    def stop(self) -> None:
        """Idempotent; leaves no process behind."""


class LineSide:
    """A driver that speaks the line protocol."""

    def __init__(self, command: Command) -> None:
        self.about: dict[str, Any] = {"over": "driver"}
        self._command = command
        self._process: EngineProcess | None = None

    def start(self) -> None:
        self._process = EngineProcess(self._command)
        self.about |= self._process.receive(START_S)["ready"]

    def measure(self, work: Work, seed: int) -> Figure:
        if self._process is None:
            self.start()
        try:
            return checked_figure(work, self._timings(make_prompts(work, seed), work.num_new))
        except SideError:
            self.stop()  # a late answer would be taken for the next one's
            raise

    def _timings(self, prompts: list[list[int]], num_new: int) -> list[Timing]:
        assert self._process is not None
        self._process.send({"prompts": prompts, "num_new": num_new})
        answer = self._process.receive(WORK_S)
        if "error" in answer:
            raise SideError(answer["error"])
        return [Timing(*timing) for timing in answer["timings"]]

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None


class HttpSide:
    """A server; the load comes from this process."""

    def __init__(self, command_of: Callable[[int], Command], api: Api) -> None:
        """``command_of`` a free port."""
        self.about: dict[str, Any] = {"over": "http"}
        self._command_of = command_of
        self._api = api
        self._process: EngineProcess | None = None
        self._port = 0

    def start(self) -> None:
        self._port = free_port()
        self._process = EngineProcess(self._command_of(self._port), stdout_to_log=True)
        deadline = time.monotonic() + START_S
        while not asyncio.run(is_ready(local(self._port), self._api)):
            if not self._process.is_running:
                raise self._process.died()
            if time.monotonic() > deadline:
                raise SideError(f"not ready after {START_S:.0f} s")
            time.sleep(0.2)

    def measure(self, work: Work, seed: int) -> Figure:
        if self._process is None:
            self.start()
        texts = [text_of(prompt) for prompt in make_prompts(work, seed)]
        try:
            if work.num_shared:
                shared = [texts[0][: work.num_shared]]
                asyncio.run(wave(self._port, self._api, shared, 1, WORK_S))
            timings = asyncio.run(wave(self._port, self._api, texts, work.num_new, WORK_S))
            return figure_of(work, timings)
        except (OSError, TimeoutError, ValueError, RefusedError) as error:
            self.stop()  # it may be dead, or still at work
            raise SideError(f"{type(error).__name__}: {error}") from error

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None


def checked_figure(work: Work, timings: list[Timing]) -> Figure:
    try:
        return figure_of(work, timings)
    except ValueError as error:
        raise SideError(str(error)) from error


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
