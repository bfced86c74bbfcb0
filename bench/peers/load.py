"""The load client: a wave of streamed requests sent at once, the same for every server."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.peers.work import Timing

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Api:
    """How a server is asked for a stream."""

    path: str
    body: Callable[[str, int], dict[str, Any]]
    marker: bytes
    """Stands once in every frame that carries a token."""
    ready_path: str
    counts_usage: bool = False
    """The last frame says how many tokens there were: frames may carry several."""


def _lmi_body(text: str, num_new: int) -> dict[str, Any]:
    parameters = {"max_new_tokens": num_new, "ignore_eos_token": True, "do_sample": False}
    return {"inputs": text, "parameters": parameters, "stream": True}


def _completions_body(text: str, num_new: int) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": text,
        "max_tokens": num_new,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


LMI = Api("/invocations", _lmi_body, b'{"token"', "/ping")
COMPLETIONS = Api("/v1/completions", _completions_body, b"data: {", "/health", counts_usage=True)


async def wave(
    port: int, api: Api, texts: Sequence[str], num_new: int, timeout_s: float
) -> list[Timing]:
    """Timings of the requests, from the moment before the first connection was opened.

    Raises OSError, TimeoutError, or ValueError when a server answers otherwise than asked.
    """
    start = time.perf_counter()
    requests = (_stream(port, api, api.body(text, num_new), start) for text in texts)
    async with asyncio.timeout(timeout_s):
        return list(await asyncio.gather(*requests))


async def is_ready(port: int, api: Api) -> bool:
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(_head("GET", api.ready_path))
        status = await reader.readuntil(b"\r\n")
        writer.close()
        return status.split()[1] == b"200"
    except (OSError, asyncio.IncompleteReadError):
        return False


async def _stream(port: int, api: Api, body: dict[str, Any], start: float) -> Timing:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        data = json.dumps(body).encode()
        writer.write(_head("POST", api.path, len(data)) + data)
        head = await reader.readuntil(b"\r\n\r\n")
        if head.split()[1] != b"200":
            status_line = head.split(b"\r\n")[0]
            raise ValueError(f"{api.path} answered {status_line!r}")
        return await _read_tokens(reader, api, start)
    finally:
        writer.close()


async def _read_tokens(reader: asyncio.StreamReader, api: Api, start: float) -> Timing:
    first_s = last_s = 0.0
    num_frames = 0
    tail = b""
    while data := await reader.read(1 << 16):
        now = time.perf_counter() - start
        num_new = (tail[-len(api.marker) + 1 :] + data).count(api.marker)
        tail = (tail + data)[-2000:]
        if num_new:
            first_s = first_s or now
            last_s = now
            num_frames += num_new
    return Timing(first_s, last_s, _usage(tail) if api.counts_usage else num_frames)


def _usage(tail: bytes) -> int:
    counts = re.findall(rb'"completion_tokens":\s*(\d+)', tail)
    if not counts:
        raise ValueError(f"the stream ended without usage: {tail[-200:]!r}")
    return int(counts[-1])


def _head(method: str, path: str, num_bytes: int = 0) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
    ).encode()
