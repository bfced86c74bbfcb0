"""Threads that fill a step's masks while it runs, and an end for one that takes too long."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue

import numpy as np

from lmi_core.errors import EngineError, UserError
from lmi_core.structured.matcher import Mask, Matcher

MAX_MASK_S = 0.5
"""Processor time of one mask, of which the largest grammars that are taken need 0.03 s."""
MAX_DRAFTS_S = 0.1
"""Of the masks of a row and of its drafts, after which no further draft is followed: a request
must not fail for what its drafts take."""
ANYTHING: Mask = np.full((1, 1), np.iinfo(np.uint32).max, np.uint32)
"""What a mask is settled with where every token may come."""
_CHECK_S = 0.1
_MAX_THREADS = 8


class MissingMask:
    """A mask that a step waits for, and those of the rows behind it, which follow draft tokens."""

    __slots__ = (
        "_drafts",
        "_lock",
        "_masks",
        "_matcher",
        "_ready",
        "clock",
        "ends_thread",
        "is_settled",
        "started_s",
    )
    needs_thread = False
    """Whether it waits for others', so that a thread is started for it alone."""

    def __init__(
        self,
        matcher: Matcher,
        masks: Sequence[Mask],
        ready: Callable[[Exception | None], None],
        drafts: list[int],
    ) -> None:
        """``ready`` is called once, from any thread, with ``masks`` filled, or cleared and the
        reason for that; ``drafts`` that can't come are -1 then. Until then nobody else may use the
        matcher."""
        self._matcher = matcher
        self._masks = masks
        self._ready = ready
        self._drafts = drafts
        self._lock = threading.Lock()
        self.is_settled = self.ends_thread = False
        self.started_s = 0.0
        self.clock: int | None = None
        """That of the thread which fills it, once one does; it began at ``started_s``."""

    def compute(self) -> tuple[Mask, Exception | None]:
        """All masks, in memory of their own, since the step may give up and go on."""
        filled = np.zeros((len(self._masks), len(self._masks[0])), np.uint32)
        try:
            self._matcher.fill_mask(filled[0])
            self._follow_drafts(filled)
        except Exception as error:
            filled[:] = 0
            return filled, error
        return filled, None

    def _follow_drafts(self, filled: Mask) -> None:
        """Fill the masks of later rows as long as the grammar allows the drafts before them, and go
        back."""
        matcher, drafts = self._matcher, self._drafts
        num_accepted = num_kept = 0
        with suppress(Exception):  # a draft that is what is sampled raises it once more
            for draft in drafts:
                is_allowed = int(filled[num_kept, draft // 32]) >> draft % 32 & 1
                if not is_allowed or self.spent_s() > MAX_DRAFTS_S:
                    break
                matcher.accept(draft)
                num_accepted += 1
                matcher.fill_mask(filled[num_kept + 1])
                num_kept += 1
        drafts[num_kept:] = [-1] * (len(drafts) - num_kept)
        if num_accepted:
            matcher.rollback(num_accepted)

    def settle(
        self, filled: Mask | None, error: Exception | None, *, ends_thread: bool = False
    ) -> bool:
        """Whether this was the first outcome, which is the one that counts. ``ends_thread``: that
        which fills it isn't needed any more when it has."""
        with self._lock:
            if self.is_settled:
                return False
            self.is_settled, self.ends_thread = True, ends_thread
            for i, mask in enumerate(self._masks):
                mask[:] = 0 if filled is None else filled[i]
            self._ready(error)
            return True

    def spent_s(self) -> float:
        """Processor time so far."""
        if self.is_settled or self.clock is None:
            return 0.0
        with suppress(OSError):  # its thread has just ended
            return time.clock_gettime(self.clock) - self.started_s
        return 0.0


class MaskThreads:
    """Fills the masks of steps in flight; all but the threads' work happens on one event loop.

    The library works without the interpreter's lock, so that masks and the loop don't wait for
    each other. It can't be stopped: the thread of a mask that is given up ends by itself when it
    can, and another takes its place.
    """

    def __init__(self) -> None:
        self._num_wanted = min(_MAX_THREADS, os.cpu_count() or 1)
        self._num_threads = 0
        self._queue: SimpleQueue[MissingMask | None] = SimpleQueue()
        self._missing: Sequence[MissingMask] = ()
        self._held: Sequence[MissingMask] = ()
        self._timer: asyncio.TimerHandle | None = None

    def fill(self, missing: Sequence[MissingMask], held: Sequence[MissingMask] = ()) -> None:
        """Begin to fill; each is settled in the end, whatever happens. From now on those are
        ``held`` that the caller settles, or has filled in time, or that ``close`` drops."""
        self._held = held
        self._missing = [*(one for one in self._missing if not one.is_settled), *missing]
        queued = [one for one in missing if not one.needs_thread]
        try:
            for one in missing:
                if one.needs_thread:
                    threading.Thread(
                        target=self._fill, args=[one], name="lmi-mask", daemon=True
                    ).start()
            while self._num_threads < min(self._num_wanted, len(queued)):
                self._start_thread()
        except RuntimeError as error:  # the system has no more threads
            failure = EngineError(f"a grammar's mask couldn't be filled: {error}")
            for one in missing:
                if one.clock is None and (one.needs_thread or not self._num_threads):
                    one.settle(None, failure)
        for one in queued if self._num_threads else ():
            self._queue.put(one)
        if missing and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check)

    def give_up(self, masks: Iterable[MissingMask], error: Exception | None = None) -> None:
        """Settle what nobody waits for any longer; another thread takes the place of one that is at
        it."""
        for one in masks:
            has_thread = one.clock is not None and not one.needs_thread
            if one.settle(None, error, ends_thread=has_thread) and has_thread:
                self._num_threads -= 1
                with suppress(RuntimeError):
                    self._start_thread()

    def close(self) -> None:
        """Let the threads end, and steps in flight, whose results are dropped. Idempotent."""
        for one in (*self._missing, *self._held):
            one.settle(None, None)
        for _ in range(self._num_threads):
            self._queue.put(None)
        self._num_threads = 0
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        """Give up what takes too long; comes again while something is missing."""
        for one in self._missing:
            if one.spent_s() > MAX_MASK_S:
                error = UserError(
                    "the grammar failed while generating: a token's mask takes more than "
                    f"{MAX_MASK_S:g} s of processor time",
                    field="grammar",
                )
                self.give_up([one], error)
        self._missing = [one for one in self._missing if not one.is_settled]
        self._timer = None
        if self._missing:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="lmi-mask", daemon=True).start()
        self._num_threads += 1

    def _work(self) -> None:
        while (one := self._queue.get()) is not None:
            if not one.is_settled:
                self._fill(one)
            if one.ends_thread:
                return

    @staticmethod
    def _fill(one: MissingMask) -> None:
        one.started_s = time.thread_time()
        one.clock = time.pthread_getcpuclockid(threading.get_ident())
        one.settle(*one.compute())
