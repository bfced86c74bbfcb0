"""Calls of several prompts: their events collected, or merged into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

from lmi_core.engine.intake import prompt_of
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stream import Subscribable, batches
from lmi_core.errors import LmiError, UserError, first_of
from lmi_server.dialects.base import Renderer
from lmi_server.http.metrics import RequestMeter
from lmi_server.http.portions import NumberedEvents, portions
from lmi_server.models.backend import Generates, Tokenizes

_PROMPTS_PER_TURN = 16
_POOLED_AT_ONCE = 64


async def take_turns(index: int) -> None:
    """Of a call's many prompts, only some are looked at in one turn of the loop."""
    if index and index % _PROMPTS_PER_TURN == 0:
        await asyncio.sleep(0)


async def collect_one(
    backend: Generates,
    request: GenerationRequest,
    index: int,
    renderer: Renderer,
    meter: RequestMeter,
) -> None:
    """Feed a prompt's events to the renderer until it ends."""
    async with aclosing(backend.generate_batches(request)) as batches:
        async for events in batches:
            for i, [(_, portion)] in enumerate(portions([(index, events)])):
                if i:
                    await asyncio.sleep(0)
                meter.observe(portion)
                renderer.feed(index, portion)


async def collect_all(
    backend: Generates, requests: list[GenerationRequest], renderer: Renderer, meter: RequestMeter
) -> None:
    """All prompts of one call at once, or, where they are pooled, so many that others get their
    turn between them; the first failure ends the others."""
    at_once = len(requests) if requests[0].pooling is None else _POOLED_AT_ONCE
    places = asyncio.Semaphore(at_once)
    if len(requests) > at_once:
        await _check_prompts(backend, requests)

    async def collect(index: int, request: GenerationRequest) -> None:
        try:
            with naming(index):
                await collect_one(backend, request, index, renderer, meter)
        finally:
            places.release()

    try:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                await take_turns(index)
                await places.acquire()
                group.create_task(collect(index, request))
    except BaseExceptionGroup as errors:
        # Older Pythons put what is raised within except* into a group again.
        for kind in (UserError, LmiError):
            if (found := errors.subgroup(kind)) is not None:
                raise first_of(found) from None
        raise


async def _check_prompts(backend: Generates, requests: list[GenerationRequest]) -> None:
    """Raise UserError for the first of many prompts that is refused before others are computed:
    tokenizing all of them twice costs little of what computing them does."""
    info = backend.info
    if info.head is None or not isinstance(backend, Tokenizes):
        return  # A model that generates refuses them all, without computing any.
    for index, request in enumerate(requests):
        await take_turns(index)
        with naming(index):
            await prompt_of(
                request,
                backend.tokenizer,
                info.head,
                max_tokens=info.max_prompt_tokens,
                vocab_size=info.runner.vocab_size,
            )


async def merged(
    backend: Generates, requests: list[GenerationRequest]
) -> AsyncGenerator[NumberedEvents, None]:
    """The events of several requests, all that are ready at once; the first failure ends all.
    Nothing of the first prompts is shown while a later one may be refused, if the backend says when
    it has taken one."""
    ready: NumberedEvents = []
    arrived = asyncio.Event()
    subscribable = backend if isinstance(backend, Subscribable) else None
    num_untaken = 0 if subscribable is None else len(requests)

    async def read(index: int, request: GenerationRequest) -> None:
        nonlocal num_untaken
        if subscribable is None:
            source = backend.generate_batches(request)
        else:
            source = batches(subscribable, request, says_taken=True)
        try:
            with naming(index):
                async with aclosing(source):
                    async for events in source:
                        if events:
                            ready.append((index, events))
                        else:
                            num_untaken -= 1
                        arrived.set()
        finally:
            arrived.set()

    tasks: list[asyncio.Task[None]] = []
    try:
        for index, request in enumerate(requests):
            await take_turns(index)
            tasks.append(asyncio.ensure_future(read(index, request)))
        open_tasks = tasks
        while open_tasks:
            await arrived.wait()
            arrived.clear()
            for task in open_tasks:
                if task.done():
                    task.result()
            open_tasks = [task for task in open_tasks if not task.done()]
            if ready and not num_untaken:
                batch, ready = ready, []
                yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def numbered(
    batches: AsyncGenerator[Sequence[TokenEvent], None],
) -> AsyncGenerator[NumberedEvents, None]:
    """The events of the only request, as ``merged`` has them."""
    async with aclosing(batches):
        async for events in batches:
            yield [(0, events)]


@contextmanager
def naming(index: int) -> Iterator[None]:
    """Have an error of one of a call's prompts say which one it is."""
    try:
        yield
    except UserError as error:
        if error.field == "prompt":
            error.args = (f"{error} (number {index}, counted from 0)",)
        raise
