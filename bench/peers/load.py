"""A wave of streamed requests sent at once, the same for every server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from lmi_core.bench.stream import CHAT, COMPLETIONS, LMI, Api, Timing, ask, is_ready
from lmi_core.http_url import HttpUrl

__all__ = ["CHAT", "COMPLETIONS", "HOST", "LMI", "Api", "is_ready", "local", "wave"]

HOST = "127.0.0.1"


def local(port: int) -> HttpUrl:
    return HttpUrl(HOST, port, "", is_https=False)


async def wave(
    port: int, api: Api, texts: Sequence[str], num_new: int, timeout_s: float
) -> list[Timing]:
    """Timings of the requests, from the moment before the first connection was opened.

    Raises OSError, TimeoutError, or ValueError when a server answers otherwise than asked.
    """
    start = time.perf_counter()
    requests = (ask(local(port), api, api.body(text, num_new)) for text in texts)
    async with asyncio.timeout(timeout_s):
        answers = await asyncio.gather(*requests)
    return [Timing(a.first_at - start, a.last_at - start, a.num_tokens) for a in answers]
