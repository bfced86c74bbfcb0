"""Copies of a model beside one engine: throughput, the router's time, prefix hits, a killed copy.

    python -m bench.copies serve --shape 160m --streams 32 --rounds 3
    python -m bench.copies router
    python -m bench.copies affinity --conversations 64 --copies 4
    python -m bench.copies kill --streams 64

``serve``: streams over HTTP, in turns with one engine on all threads and with copies that share
them, of each a median of tokens a second; ``front`` is the processor time of the server's process
a token where copies compute, HTTP included. ``router``: the processor time a token of what copies
add to that process: messages, events, load. ``affinity``: turns of conversations, each with all
before it as its prompt, by copies and by one engine with as much KV memory as all of them; other
conversations in each round, since what is found differs by a few hundredths from one to the next.
``kill``: a copy is killed while streams run; texts are compared with an undisturbed run's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench.checkpoints import SHAPES, checkpoint
from bench.server_process import cpu_ns, started
from lmi_core import _native
from lmi_core.bench.stream import LMI, ask
from lmi_core.copies.copies import Copies
from lmi_core.copies.dispatch import Dispatch
from lmi_core.copies.open_request import OpenRequest
from lmi_core.copies.outbox import Batch, CopyStream, Outbox
from lmi_core.copies.router import Entry
from lmi_core.demo import MODEL_DIR
from lmi_core.engine.engine import Engine
from lmi_core.engine.handover import Handover
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stream import EventStream
from lmi_core.http_url import HttpUrl
from lmi_core.sandbox import message
from lmi_core.settings.engine_config import EngineConfig

TEXT = "the fox went to a castle by the sea and told its friend about three small red boats"


def say(text: str) -> None:
    load = ", ".join(f"{one:.1f}" for one in os.getloadavg())
    print(f"{text}  (load averages {load})", flush=True)


def serve(arguments: argparse.Namespace) -> None:
    num_threads = _native.num_physical_cores()
    each = max(1, num_threads // arguments.copies)
    model = model_of(arguments.shape)
    common = [sys.executable, "-m", "lmi_core", "serve", str(model), "--device", "cpu"]
    common += ["--option", f"max_rolling_batch_size={arguments.streams}"]
    common += ["--option", "max_model_len=512"]
    kinds = {
        "engine": [f"num_threads={num_threads}"],
        "copies": [f"num_threads={each}", f"num_copies={arguments.copies}"],
    }
    speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
    fronts = []
    for _ in range(arguments.rounds):
        for kind, options in kinds.items():
            command = [*common, *(part for one in options for part in ("--option", one))]
            with started(command) as server:
                asyncio.run(streams(server.port, arguments.streams, 8))
                begin_s, begin_ns = time.perf_counter(), cpu_ns(server.pid)
                num_tokens = asyncio.run(streams(server.port, arguments.streams, arguments.tokens))
                speeds[kind].append(num_tokens / (time.perf_counter() - begin_s))
                if kind == "copies":
                    fronts.append((cpu_ns(server.pid) - begin_ns) / 1e3 / num_tokens)
    medians = {kind: statistics.median(values) for kind, values in speeds.items()}
    for kind, values in speeds.items():
        say(f"{kind}: {medians[kind]:.1f} tok/s ({min(values):.1f}-{max(values):.1f})")
    ratio = medians["copies"] / medians["engine"]
    say(f"copies / engine: {ratio:.3f}; front {statistics.median(fronts):.1f} us a token")


def model_of(shape: str) -> Path:
    return MODEL_DIR if shape == "demo" else checkpoint(shape)


async def streams(port: int, number: int, num_tokens: int) -> int:
    url = HttpUrl.parse(f"http://127.0.0.1:{port}")
    bodies = [LMI.body(f"{i} {TEXT}", num_tokens) for i in range(number)]
    answers = await asyncio.gather(*(ask(url, LMI, body) for body in bodies))
    return sum(answer.num_tokens for answer in answers)


class Sink:
    """A copy that takes requests and does nothing."""

    copy_id = 0
    unread: tuple[int, ...] = ()

    def open(self, number: int, request: GenerationRequest, handover: Handover) -> None:
        pass

    def abort(self, number: int) -> None:
        pass

    def unpin(self, session: str) -> None:
        pass


def router(arguments: argparse.Namespace) -> None:
    asyncio.run(_router(arguments.streams, arguments.tokens))


def _read_into(read: list[TokenEvent]) -> EventStream:
    """A stream whose reader takes its events as soon as it is told."""
    stream = EventStream(lambda: read.extend(stream.take()[0]))
    return stream


async def _router(num_streams: int, num_tokens: int) -> None:
    dispatch = Dispatch(32, None)
    dispatch.add_copy(Sink(), room=num_streams, num_blocks=1000)
    read: list[TokenEvent] = []
    for number in range(num_streams):
        dispatch.put(open_request(number, num_tokens, _read_into(read)))
    frames = [frame(num_streams, position) for position in range(num_tokens - 1)]
    begin_ns = time.process_time_ns()
    for data in frames:
        received = bytearray(data)
        while (parts := message.take(received)) is not None:
            dispatch.take(Batch(*message.decode(parts)[1:]))
    used_ns = time.process_time_ns() - begin_ns
    assert len(read) == num_streams * len(frames)
    say(f"router: {used_ns / 1e3 / len(read):.2f} us of processor time a token")


def open_request(number: int, num_tokens: int, stream: EventStream) -> OpenRequest:
    params = SamplingParams(max_new_tokens=num_tokens, seed=0)
    request = GenerationRequest(
        request_id=str(number), prompt_token_ids=tuple(range(64)), params=params
    )
    entry = Entry(number, num_prompt_tokens=64, num_output_tokens=num_tokens)
    return OpenRequest(
        request,
        entry,
        stream,
        arrival_s=0.0,
        prefix_seed=b"",
        hashes=[],
        num_first=0,
        on_end=lambda: None,
    )


def frame(num_streams: int, position: int) -> bytes:
    """A copy's message of one step: a token for every stream."""
    batches: list[Batch] = []
    outbox = Outbox(batches.append)
    for number in range(num_streams):
        CopyStream(number, outbox).put(
            TokenEvent(
                request_id=str(number),
                choice=0,
                token_id=position % 30000,
                text=" word",
                num_generated_tokens=position + 1,
            )
        )
    outbox.observe("on_token_intervals", [0.01] * num_streams)
    outbox.flush()
    parts = message.encode(("batch", *batches[0]))
    return b"".join((message.head(parts), *map(bytes, parts)))


def affinity(arguments: argparse.Namespace) -> None:
    asyncio.run(_affinity(arguments))


async def _affinity(arguments: argparse.Namespace) -> None:
    each = EngineConfig(
        model=MODEL_DIR, max_num_seqs=16, kv_cache_bytes=arguments.kv_bytes, max_model_len=512
    )
    num_copies = arguments.copies
    whole = replace(
        each, kv_cache_bytes=num_copies * arguments.kv_bytes, max_num_seqs=16 * num_copies
    )
    async with Engine(whole) as engine:
        of_engine = [await hit_rate(engine, arguments, i) for i in range(arguments.rounds)]
    async with Copies(replace(each, num_threads=1), num_copies) as copies:
        of_copies = [await hit_rate(copies, arguments, i) for i in range(arguments.rounds)]
    shares = [own / one for own, one in zip(of_copies, of_engine, strict=True)]
    say(
        f"{arguments.conversations} conversations of {arguments.turns} turns: one engine has "
        f"{statistics.mean(of_engine):.1%} of the prompts' tokens, {num_copies} copies "
        f"{statistics.mean(of_copies):.1%}, which is {statistics.mean(shares):.3f} of it "
        f"({min(shares):.3f}-{max(shares):.3f})"
    )


async def hit_rate(source: Engine | Copies, arguments: argparse.Namespace, round_id: int) -> float:
    """Cached tokens of prompts; every conversation goes on a random time after its last answer."""
    num_prompt = num_cached = 0

    async def converse(number: int) -> None:
        nonlocal num_prompt, num_cached
        chance = random.Random(f"{round_id} {number}")
        ids = [chance.randrange(100, 500) for _ in range(96)]
        for turn in range(arguments.turns):
            await asyncio.sleep(chance.random() * arguments.pause_s)
            request = GenerationRequest(
                request_id=f"{round_id}-{number}-{turn}",
                prompt_token_ids=tuple(ids),
                params=SamplingParams(max_new_tokens=24, ignore_eos=True),
            )
            events = await answer(source, request)
            num_prompt += len(ids)
            num_cached += events[0].num_cached_tokens
            ids += [event.token_id for event in events]
            ids += [chance.randrange(100, 500) for _ in range(16)]

    await asyncio.gather(*(converse(number) for number in range(arguments.conversations)))
    return num_cached / num_prompt


async def answer(source: Engine | Copies, request: GenerationRequest) -> list[TokenEvent]:
    return [event async for events in source.generate_batches(request) for event in events]


def kill(arguments: argparse.Namespace) -> None:
    asyncio.run(_kill(arguments))


async def _kill(arguments: argparse.Namespace) -> None:
    model = model_of(arguments.shape)
    config = EngineConfig(model=model, max_num_seqs=32, max_model_len=512, kv_cache_bytes=64 << 20)
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt=f"{number} {TEXT}",
            params=SamplingParams(
                max_new_tokens=arguments.tokens,
                ignore_eos=True,
                temperature=number % 2,
                seed=number,
            ),
        )
        for number in range(arguments.streams)
    ]
    async with Copies(config, arguments.copies) as copies:
        undisturbed = await asyncio.gather(*(answer(copies, one) for one in requests))
        tasks = [asyncio.create_task(answer(copies, one)) for one in requests]
        target = copies.num_tokens + arguments.streams * arguments.tokens // 2
        await until(lambda: copies.num_tokens >= target)
        os.kill(copies.copies[0].pid, signal.SIGKILL)
        begin = time.perf_counter()
        await until(lambda: copies.lacks_workers)
        await until(lambda: not copies.lacks_workers)
        seconds = time.perf_counter() - begin
        disturbed = await asyncio.gather(*tasks, return_exceptions=True)
    num_equal = sum(
        not isinstance(one, BaseException) and text(one) == text(other)
        for one, other in zip(disturbed, undisturbed, strict=True)
    )
    say(
        f"{num_equal} of {len(requests)} streams have the undisturbed run's text; all copies run "
        f"again {seconds:.2f} s after the kill"
    )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (there is no event for it)
        await asyncio.sleep(0.001)


def text(events: list[TokenEvent]) -> str:
    return "".join(event.text for event in events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("serve", "router", "affinity", "kill"))
    parser.add_argument("--shape", choices=[*sorted(SHAPES), "demo"], default="160m")
    parser.add_argument("--copies", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--pause-s", type=float, default=1.0)
    parser.add_argument("--kv-bytes", type=int, default=4 << 20, help="of each copy, in affinity")
    arguments = parser.parse_args()
    {"serve": serve, "router": router, "affinity": affinity, "kill": kill}[arguments.what](
        arguments
    )


if __name__ == "__main__":
    main()
