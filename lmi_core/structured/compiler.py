"""Compiled grammars of one engine: off the event loop, each once, the most recent ones kept."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from lmi_core.errors import LmiError, UserError
from lmi_core.sandbox.pool import Limits, shared_pool
from lmi_core.structured.grammar import Grammar
from lmi_core.structured.library import is_installed, try_in_child
from lmi_core.structured.matcher import CompiledGrammar, GrammarLibrary

_MAX_CACHED = 128
_TIMEOUT_S = 10.0
_SMALL_CHARS = 4096
"""Longer grammars are compiled in a child first, which can be ended: in a thread the library would
go on to the end, for 17 s with 9000 properties."""


def _limits(grammar: Grammar) -> Limits:
    return Limits(what=f"compiling {grammar.field}", field=grammar.field, processor_s=3)


class _Compiling:
    """A grammar on its way, and how many wait for it."""

    __slots__ = ("num_waiting", "task")

    def __init__(self, task: asyncio.Task[CompiledGrammar]) -> None:
        self.task = task
        self.num_waiting = 0


class GrammarCompiler:
    """Compiles in threads, which the library does without the GIL."""

    def __init__(
        self,
        make_library: Callable[[], GrammarLibrary],
        *,
        max_cached: int = _MAX_CACHED,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """``make_library`` is called by ``prepare``, or for the first grammar in a thread: it reads
        the whole vocabulary. What it raises, every grammar gets."""
        self._make_library = make_library
        self._max_cached = max_cached
        self._timeout_s = timeout_s
        self._library: GrammarLibrary | None = None
        self._library_lock = threading.Lock()
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        # By what errors call it as well, which differs among equal grammars.
        self._compiling: dict[tuple[Grammar, str], _Compiling] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="lmi-grammar")

    def prepare(self) -> None:
        """Make the library, in any thread, if it is there for this model.

        It holds the interpreter's lock meanwhile: 0.8 s and 48 MB for 128,000 tokens, so that this
        belongs where nobody is served yet.
        """
        with suppress(LmiError):  # grammars are refused with it
            self._made_library()

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises UserError for a grammar that is wrong, too large or takes too long."""
        cached = self._cache.get(grammar)
        if cached is not None:
            self._cache.move_to_end(grammar)
            return cached
        key = grammar, grammar.field
        compiling = self._compiling.get(key)
        if compiling is None:
            compiling = _Compiling(asyncio.ensure_future(self._compiled(grammar)))
            self._compiling[key] = compiling
        compiling.num_waiting += 1
        try:
            return await asyncio.shield(compiling.task)
        finally:
            compiling.num_waiting -= 1
            if not compiling.num_waiting:
                del self._compiling[key]
                compiling.task.cancel()

    async def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        """What is kept from then on."""
        loop = asyncio.get_running_loop()
        if grammar.num_chars > _SMALL_CHARS and is_installed():
            await shared_pool().run(try_in_child, grammar, limits=_limits(grammar))
        try:
            async with asyncio.timeout(self._timeout_s):
                compiled = await loop.run_in_executor(self._threads, self._compile, grammar)
        except TimeoutError:
            raise UserError(
                f"{grammar.field} couldn't be compiled within {self._timeout_s:g} s; "
                "make it simpler",
                field=grammar.field,
            ) from None
        self._cache[grammar] = compiled
        if len(self._cache) > self._max_cached:
            self._cache.popitem(last=False)
        return compiled

    def close(self) -> None:
        """Release the threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        return self._made_library().compile(grammar)

    def _made_library(self) -> GrammarLibrary:
        with self._library_lock:
            if self._library is None:
                self._library = self._make_library()
        return self._library
