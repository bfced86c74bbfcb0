"""From an engine's events to a response: collected, or streamed with one write per wake-up."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TypeVar

from aiohttp import web

from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stream import Subscribable
from lmi_core.errors import EngineError, LmiError
from lmi_server.dialects.base import ParsedCall, Renderer
from lmi_server.dialects.large_bodies import rendered
from lmi_server.http.answer_deadline import AnswerDeadline, AnswerLimits
from lmi_server.http.frame_writer import FrameWriter
from lmi_server.http.long_body import body_of, names_prompts, num_items
from lmi_server.http.metrics import RequestMeter
from lmi_server.http.portions import NumberedEvents, in_turns
from lmi_server.http.pushed_batches import PushedBatches
from lmi_server.http.several_prompts import (
    collect_all,
    collect_one,
    merged,
    numbered,
    take_turns,
)
from lmi_server.http.tenants import owned
from lmi_server.models.backend import Generates

log = logging.getLogger(__name__)

T = TypeVar("T")


async def respond(
    request: web.Request,
    backend: Generates,
    parsed: ParsedCall,
    meter: RequestMeter,
    *,
    send_timeout_s: float,
    limits: AnswerLimits = AnswerLimits(),  # noqa: B008 it is frozen
) -> web.StreamResponse:
    """Run a call and answer it. Errors before the first byte are raised, later ones are sent."""
    requests: list[GenerationRequest] = []
    for index, asked in enumerate(parsed.requests):
        await take_turns(index)
        asked = owned(request, asked.behind_first() if index else asked)
        requests.append(await truncated(backend, asked, parsed.truncate_prompt_tokens))
    meter.submit(backend.info.model, requests, parsed.prompt_field)
    if parsed.renderer.streams:
        return await _streamed(request, backend, requests, parsed, meter, send_timeout_s, limits)
    try:
        async with AnswerDeadline(meter, limits):
            if len(requests) == 1:
                await collect_one(backend, requests[0], 0, parsed, meter)
            else:
                await collect_all(backend, requests, parsed, meter)
    except EngineError as error:
        return _failed(parsed, meter, error)
    return _whole(parsed, await rendered(parsed.renderer.finish, num_items(parsed, meter)))


async def _streamed(
    request: web.Request,
    backend: Generates,
    requests: Sequence[GenerationRequest],
    parsed: ParsedCall,
    meter: RequestMeter,
    send_timeout_s: float,
    limits: AnswerLimits,
) -> web.StreamResponse:
    times = send_timeout_s, limits
    has_long = names_prompts(requests[0]) or parsed.renderer.ends_at_length
    if len(requests) == 1 and not has_long and isinstance(backend, Subscribable):
        feed = partial(_feed, parsed.renderer, meter, 0)
        pushed = PushedBatches(backend, requests[0])
        push_to = partial(pushed.push_to, feed=feed)
        return await _stream(request, pushed.batches(), feed, parsed, meter, *times, push_to)
    if len(requests) == 1:
        batches = numbered(backend.generate_batches(requests[0]))
    else:
        batches = merged(backend, list(requests))
    if has_long:
        frames = _frames(in_turns(batches, 1), parsed.renderer, meter)
        return await _stream(request, frames, bytes, parsed, meter, *times)
    feed_all = partial(_feed_all, parsed.renderer, meter)
    return await _stream(request, in_turns(batches), feed_all, parsed, meter, *times)


def _whole(parsed: ParsedCall, body: bytes) -> web.Response:
    renderer = parsed.renderer
    headers = {**parsed.headers, **renderer.headers(), "Content-Type": renderer.content_type}
    return web.Response(body=body_of(body), headers=headers)


def _failed(parsed: ParsedCall, meter: RequestMeter, error: EngineError) -> web.Response:
    """The answer that a failure before its first byte leaves, where it is no error of the call."""
    if not parsed.renderer.absorbs_failures:
        raise error
    meter.error = str(error)
    return _whole(parsed, parsed.renderer.error(error))


async def truncated(
    backend: Generates, request: GenerationRequest, num_tokens: int | None
) -> GenerationRequest:
    """With so many of its prompt's last tokens; -1: as many as fit."""
    if num_tokens is None:
        return request
    token_ids: Sequence[int] = request.prompt_token_ids or ()
    if request.prompt is not None:
        special = request.add_special_tokens
        token_ids = await backend.encode(request.prompt, add_special_tokens=special)
    if num_tokens < 0:
        num_tokens = backend.max_model_len - 1
    if len(token_ids) <= num_tokens:
        return request
    return replace(request, prompt=None, prompt_token_ids=tuple(token_ids[-num_tokens:]))


def _feed(
    renderer: Renderer, meter: RequestMeter, index: int, events: Sequence[TokenEvent]
) -> bytes:
    meter.observe(events)
    return renderer.feed(index, events)


def _feed_all(renderer: Renderer, meter: RequestMeter, numbered: NumberedEvents) -> bytes:
    return b"".join([_feed(renderer, meter, index, events) for index, events in numbered])


async def _frames(
    batches: AsyncGenerator[NumberedEvents, None], renderer: Renderer, meter: RequestMeter
) -> AsyncGenerator[bytes, None]:
    """Of single events, of which each choice's first one tells of the whole prompt, and the last
    one of all tokens."""
    async with aclosing(batches):
        async for [(index, events)] in batches:
            meter.observe(events)
            event = events[-1]
            num_tokens = event.num_prompt_tokens if event.num_generated_tokens == 1 else 0
            if event.finish_reason is not None:
                num_tokens += event.num_generated_tokens
            num_items = num_tokens * (1 + len(event.top))
            yield await rendered(partial(renderer.feed, index, events), num_items)


async def _stream(
    request: web.Request,
    batches: AsyncGenerator[T, None],
    feed: Callable[[T], bytes],
    parsed: ParsedCall,
    meter: RequestMeter,
    send_timeout_s: float,
    limits: AnswerLimits,
    push_to: Callable[[FrameWriter], None] | None = None,
) -> web.StreamResponse:
    """One write per batch: while a slow client blocks one, the engine gathers the next. ``push_to``
    is called once the status line is out."""
    renderer = parsed.renderer
    async with aclosing(batches):
        # The status line waits for the first events, so that a refusal can still set the status.
        try:
            async with AnswerDeadline(meter, limits):
                batch = None if renderer.starts_at_once else await anext(batches)
        except EngineError as error:
            return _failed(parsed, meter, error)
        response = web.StreamResponse(
            headers={**parsed.headers, "Content-Type": renderer.content_type}
        )
        await response.prepare(request)
        with FrameWriter(request, response, send_timeout_s, renderer.keep_alive) as writer:
            try:
                async with AnswerDeadline(meter, limits):
                    while True:
                        frame = b"" if batch is None else feed(batch)
                        if frame:
                            await writer.send(frame)
                            if push_to is not None:
                                push_to(writer)
                                push_to = None
                        batch = await anext(batches)
            except StopAsyncIteration:
                frame = renderer.finish()
            except ConnectionError:
                raise
            except Exception as error:
                meter.error = str(error)
                frame = renderer.error(_presentable(error, meter.request_id))
            await writer.send(frame)
            await response.write_eof()
    return response


def _presentable(error: Exception, request_id: str) -> Exception:
    if isinstance(error, LmiError):
        return error
    log.error("request %s failed in mid-stream", request_id, exc_info=error)
    return EngineError(f"The request failed inside the server; incident {request_id}")
