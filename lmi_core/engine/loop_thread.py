"""An event loop in a thread of its own, for hosts whose loop blocks or that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lmi_core.engine.stream import EventStream
from lmi_core.errors import EngineError

if TYPE_CHECKING:
    from lmi_core.engine.core import EngineCore
    from lmi_core.engine.request import GenerationRequest

T = TypeVar("T")


class LoopThread:
    """Runs coroutines and calls of other threads on its loop, from creation to ``close``."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        self._closing = threading.Lock()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; the future is its result, and cancels it. EngineError once closed."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise EngineError("the engine is stopped, it takes no new requests") from None

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Call a function soon; nothing happens once closed."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """Stop the loop and join the thread. Idempotent, in any thread but its own."""
        with self._closing:
            if self.loop.is_closed():
                return
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())


async def subscribe_across(
    thread: LoopThread, core: EngineCore, request: GenerationRequest, notify: Callable[[], None]
) -> EventStream:
    """Read, in the caller's event loop, a request that runs in the engine's own thread."""
    caller = asyncio.get_running_loop()

    def notify_across() -> None:
        with suppress(RuntimeError):  # the caller's loop was closed without ending the request
            caller.call_soon_threadsafe(notify)

    stream = EventStream(notify_across)
    try:
        await asyncio.wrap_future(thread.submit(core.open(request, stream)))
    except BaseException:
        thread.call(core.abort, request.request_id, stream)
        raise
    stream.abort = partial(thread.call, core.abort, request.request_id)
    return stream
