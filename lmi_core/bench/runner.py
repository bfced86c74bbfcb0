"""Passing a workload through a server, or through an engine in this process."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from lmi_core.bench.figures import Run
from lmi_core.bench.stream import Answer, Api, RefusedError, ask
from lmi_core.bench.workload import Request, Session, arrivals
from lmi_core.engine.engine import Engine
from lmi_core.errors import LmiError
from lmi_core.http_url import HttpUrl

Target = Callable[[Request], Awaitable[Answer]]
"""Does a request; raises OSError, ValueError or LmiError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """When sessions start: ``rate`` of them a second, or ``concurrency`` at once."""

    concurrency: int = 8
    rate: float | None = None
    burstiness: float = 1.0
    timeout_s: float = 600.0


def server_target(url: HttpUrl, api: Api, model: str) -> Target:
    """``model``: whom a protocol that names models asks."""

    async def do(request: Request) -> Answer:
        body = api.body(request.text, request.num_new)
        return await ask(url, api, {**body, "model": model} if "model" in body else body)

    return do


def engine_target(engine: Engine) -> Target:
    """A prompt has exactly as many tokens as the request has words."""
    vocab_size = engine.info.runner.vocab_size

    async def do(request: Request) -> Answer:
        ids = [_token_id(word, i, vocab_size) for i, word in enumerate(request.words)]
        answer = Answer(time.perf_counter(), num_prompt_tokens=len(ids))
        events = engine.generate(ids, max_new_tokens=request.num_new, ignore_eos=True)
        async for event in events:
            now = time.perf_counter()
            if answer.num_tokens:
                answer.intervals_s.append(now - answer.last_at)
            else:
                answer.first_at = now
            answer.last_at, answer.num_tokens = now, event.num_generated_tokens
        return answer

    return do


def _token_id(word: str, position: int, vocab_size: int) -> int:
    """The same for equal texts, so that equal prefixes stay so."""
    return random.Random(f"{word} {position}").randrange(min(300, vocab_size // 2), vocab_size)


async def run_sessions(
    target: Target, sessions: Sequence[Session], pace: Pace, seed: int = 0
) -> Run:
    """Do all of it; a failure ends its session and is counted."""
    run = Run(0.0, [])
    started = time.perf_counter()

    async def session(steps: Session) -> None:
        try:
            for step in steps:
                async with asyncio.timeout(pace.timeout_s):
                    run.answers.append(await target(step))
        except (OSError, TimeoutError, ValueError, RefusedError, LmiError) as error:
            run.failures.append(f"{type(error).__name__}: {error}")

    if pace.rate is None:
        await _at_once(session, sessions, pace.concurrency)
    else:
        times = arrivals(len(sessions), pace.rate, pace.burstiness, seed)
        await asyncio.gather(
            *(_later(session, s, t, started) for s, t in zip(sessions, times, strict=True))
        )
    run.seconds = time.perf_counter() - started
    return run


async def _at_once(
    do: Callable[[Session], Awaitable[None]], sessions: Sequence[Session], concurrency: int
) -> None:
    waiting = iter(sessions)

    async def client() -> None:
        for each in waiting:
            await do(each)

    await asyncio.gather(*(client() for _ in range(concurrency)))


async def _later(
    do: Callable[[Session], Awaitable[None]], session: Session, after_s: float, started: float
) -> None:
    await asyncio.sleep(max(0.0, started + after_s - time.perf_counter()))
    await do(session)
