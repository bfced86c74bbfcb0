"""An event loop in a thread of its own, for hosts whose loop blocks or that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from lmi_core.errors import EngineError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines and calls of other threads on its loop, from creation to ``close``."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

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
        """Stop the loop and join the thread. Idempotent."""
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
