"""From an engine's events to a response: collected, or streamed with one write per wake-up."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from aiohttp import web

from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stream import Subscribable
from lmi_core.errors import EngineError, LmiError
from lmi_server.dialects.base import ParsedCall, Renderer
from lmi_server.dialects.large_bodies import rendered
from lmi_server.http.answer_deadline import AnswerDeadline
from lmi_server.http.frame_writer import FrameWriter
from lmi_server.http.long_body import body_of, names_prompts, num_items
from lmi_server.http.metrics import METER, RequestMeter
from lmi_server.http.portions import NumberedEvents, in_turns
from lmi_server.http.pushed_frames import PushedFrames
from lmi_server.http.several_prompts import (
    collect_all,
    collect_one,
    merged,
    numbered,
    take_turns,
)
from lmi_server.http.tenants import owned
from lmi_server.models.backend import Generates
from lmi_server.models.loaded_model import LoadedModel

log = logging.getLogger(__name__)


async def owned_requests(
    request: web.Request, backend: Generates, parsed: ParsedCall
) -> list[GenerationRequest]:
    """What the engine is asked for a call, in its tenant's name; told to the call's meter."""
    requests: list[GenerationRequest] = []
    for index, asked in enumerate(parsed.requests):
        await take_turns(index)
        asked = owned(request, asked.behind_first() if index else asked)
        requests.append(await truncated(backend, asked, parsed.truncate_prompt_tokens))
    request[METER].submit(backend.info.model, requests, parsed.prompt_field)
    return requests


async def respond(
    request: web.Request,
    model: LoadedModel,
    backend: Generates,
    requests: list[GenerationRequest],
    renderer: Renderer,
) -> web.StreamResponse:
    """Run a call and answer it. Errors before the first byte are raised, later ones are sent."""
    meter = request[METER]
    if renderer.streams:
        return await _streamed(request, model, backend, requests, renderer)
    try:
        async with AnswerDeadline(meter, model.options.limits):
            if len(requests) == 1:
                await collect_one(backend, requests[0], 0, renderer, meter)
            else:
                await collect_all(backend, requests, renderer, meter)
    except EngineError as error:
        return _failed(renderer, meter, error)
    return _whole(renderer, await rendered(renderer.finish, num_items(requests, meter)))


async def _streamed(
    request: web.Request,
    model: LoadedModel,
    backend: Generates,
    requests: list[GenerationRequest],
    renderer: Renderer,
) -> web.StreamResponse:
    meter = request[METER]
    has_long = names_prompts(requests[0]) or renderer.ends_at_length
    if len(requests) == 1 and not has_long and isinstance(backend, Subscribable):
        pushed = PushedFrames(backend, requests[0], renderer, meter)
        return await _stream(request, model, pushed.frames(), renderer, pushed.push_to)
    if len(requests) == 1:
        batches = numbered(backend.generate_batches(requests[0]))
    else:
        batches = merged(backend, requests)
    if has_long:
        frames = _long_frames(in_turns(batches, 1), renderer, meter)
    else:
        frames = _frames(in_turns(batches), renderer, meter)
    return await _stream(request, model, frames, renderer)


def _whole(renderer: Renderer, body: bytes) -> web.Response:
    headers = {**renderer.headers, **renderer.final_headers()}
    headers["Content-Type"] = renderer.content_type
    return web.Response(body=body_of(body), headers=headers)


def _failed(renderer: Renderer, meter: RequestMeter, error: EngineError) -> web.Response:
    """The answer that a failure before its first byte leaves, where it is no error of the call."""
    if not renderer.absorbs_failures:
        raise error
    meter.error = str(error)
    return _whole(renderer, renderer.error(error))


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


async def _frames(
    batches: AsyncGenerator[NumberedEvents, None], renderer: Renderer, meter: RequestMeter
) -> AsyncGenerator[bytes, None]:
    """One per batch; empty: nothing to say yet."""
    async with aclosing(batches):
        async for batch in batches:
            for _, events in batch:
                meter.observe(events)
            yield b"".join([renderer.feed(index, events) for index, events in batch])


async def _long_frames(
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
    model: LoadedModel,
    frames: AsyncGenerator[bytes, None],
    renderer: Renderer,
    push_to: Callable[[FrameWriter], None] | None = None,
) -> web.StreamResponse:
    """One write per frame: while a slow client blocks one, the engine gathers the next. ``push_to``
    is called once the status line is out."""
    meter, limits = request[METER], model.options.limits
    async with aclosing(frames):
        # The status line waits for the first events, so that a refusal can still set the status.
        try:
            async with AnswerDeadline(meter, limits):
                frame = b"" if renderer.starts_at_once else await anext(frames)
        except EngineError as error:
            return _failed(renderer, meter, error)
        headers = {**renderer.headers, "Content-Type": renderer.content_type}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        timeout_s = model.options.send_timeout_s
        with FrameWriter(request, response, timeout_s, renderer.keep_alive) as writer:
            try:
                async with AnswerDeadline(meter, limits):
                    while True:
                        if frame:
                            await writer.send(frame)
                            if push_to is not None:
                                push_to(writer)
                                push_to = None
                        frame = await anext(frames)
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
