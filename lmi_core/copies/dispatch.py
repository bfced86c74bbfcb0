"""Open requests and the copies that run them: each gets to its end once, whatever copies do."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from lmi_core.copies.autoscale import Demand
from lmi_core.copies.open_request import OpenRequest
from lmi_core.copies.outbox import Batch
from lmi_core.copies.router import Router
from lmi_core.engine.handover import Handover
from lmi_core.engine.intake import waited_too_long
from lmi_core.engine.request import GenerationRequest
from lmi_core.errors import EngineError
from lmi_core.runners.runner import RunnerInfo
from lmi_core.sandbox import message

MAX_LOSSES = 3
"""A request that so many copies ended with is the likely reason, and fails."""

HashBlocks = Callable[[Sequence[int], bytes, bytes], list[bytes]]


class Runs(Protocol):
    """What runs requests: a copy."""

    @property
    def copy_id(self) -> int: ...

    @property
    def unread(self) -> Collection[int]:
        """Requests that were sent to it, of which it hasn't said that it has them."""
        ...

    def open(self, number: int, request: GenerationRequest, handover: Handover) -> None: ...

    def abort(self, number: int) -> None: ...

    def unpin(self, session: str) -> None: ...


class Dispatch:
    """Used in one event loop."""

    def __init__(self, block_size: int, hash_blocks: HashBlocks | None) -> None:
        """``hash_blocks``: None: prefixes aren't cached."""
        self._block_size = block_size
        self._hash_blocks = hash_blocks
        self._router = Router(block_size)
        self._open: dict[int, OpenRequest] = {}
        self._copies: dict[int, Runs] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        """Of requests that may wait only so long; in a copy, its engine sees to that."""
        self._ended = asyncio.Event()
        """Set whenever a request ends or a copy goes."""
        self.num_ended = 0
        self.num_resumed = 0
        """Times that a request went on in another copy."""
        self.num_tokens = 0
        """Handed over."""

    def __len__(self) -> int:
        """Requests that haven't ended."""
        return len(self._open)

    @property
    def num_seqs(self) -> int:
        return self._router.num_seqs

    def demand(self, runner: RunnerInfo) -> Demand:
        """What open requests take of copies with such runners."""
        return Demand(
            num_seqs=self._router.num_seqs,
            num_tokens=self._router.num_tokens,
            seqs_of_copy=runner.max_num_seqs,
            tokens_of_copy=runner.num_blocks * runner.block_size,
        )

    @property
    def num_waiting(self) -> int:
        """Requests that no copy has."""
        return self._router.num_waiting

    def has_request(self, request_id: str) -> bool:
        return any(open_.request.request_id == request_id for open_ in self._open.values())

    def add_copy(self, copy: Runs, *, room: int, num_blocks: int) -> None:
        """A copy takes requests: of so many sequences at once, with so many KV blocks."""
        self._copies[copy.copy_id] = copy
        self._router.add_copy(copy.copy_id, room=room, num_blocks=num_blocks)
        self._assign()

    def remove_copy(self, copy: Runs) -> None:
        """A copy is lost: its requests go on elsewhere."""
        if self._copies.pop(copy.copy_id, None) is None:
            return
        for entry in self._router.remove_copy(copy.copy_id):
            open_ = self._open[entry.number]
            open_.num_losses += entry.number not in copy.unread
            if open_.is_finished:
                self._end(open_, None)
            elif open_.num_losses >= MAX_LOSSES:
                why = f"{MAX_LOSSES} copies of the model ended while they ran the request"
                self._end(open_, EngineError(why))
            else:
                self.num_resumed += open_.has_begun
                self._limit(open_)
        self._ended.set()
        self._assign()

    def has_copy(self, copy: Runs) -> bool:
        return copy.copy_id in self._copies

    async def drain_copy(self, copy: Runs) -> None:
        """Give a copy no more requests, and return when it has none; as before if cancelled."""
        if self.has_copy(copy):
            self._router.close_copy(copy.copy_id)
        try:
            while self.has_copy(copy) and self._router.requests_of(copy.copy_id):
                self._ended.clear()
                await self._ended.wait()
        except asyncio.CancelledError:
            if self.has_copy(copy):
                self._router.reopen_copy(copy.copy_id)
                self._assign()
            raise

    def put(self, open_: OpenRequest) -> None:
        """Run a request; its stream gets exactly one end."""
        self._open[open_.number] = open_
        self._router.put(open_.entry)
        self._limit(open_)
        self._assign()

    def _limit(self, open_: OpenRequest) -> None:
        """End it when it has waited too long for a copy."""
        asked_s = open_.request.max_queue_s
        most_s = math.inf if asked_s is None else asked_s
        if most_s < math.inf and not open_.has_begun and open_.number not in self._timers:
            at_s = open_.arrival_s + most_s
            timer = asyncio.get_running_loop().call_at(at_s, self._expire, open_)
            self._timers[open_.number] = timer

    def _expire(self, open_: OpenRequest) -> None:
        del self._timers[open_.number]
        if open_.entry.copy_id is None:
            waited_s = time.monotonic() - open_.arrival_s
            self._end(open_, waited_too_long(waited_s, open_.request.max_queue_s))

    def abort(self, open_: OpenRequest) -> None:
        """End a request early: a last event for every choice that has had none. Idempotent."""
        if open_.number not in self._open:
            return
        copy_id = open_.entry.copy_id
        copy = None if copy_id is None else self._copies[copy_id]
        for event in open_.abort_events():
            open_.stream.put(event)
        self._end(open_, None)
        if copy is not None:
            copy.abort(open_.number)
        self._assign()

    def unpin(self, session: str) -> None:
        """Let go of a session's blocks in every copy: one of its requests may run elsewhere."""
        self._router.end_session(session)
        for copy in self._copies.values():
            copy.unpin(session)

    def abort_all(self) -> None:
        for open_ in list(self._open.values()):
            self.abort(open_)

    def abort_request(self, request_id: str) -> None:
        for open_ in list(self._open.values()):
            if open_.request.request_id == request_id:
                self.abort(open_)

    def fail_all(self, error: Exception) -> None:
        for open_ in list(self._open.values()):
            self._end(open_, error)

    async def idle(self) -> None:
        """Return once no request is open."""
        while self._open:
            self._ended.clear()
            await self._ended.wait()

    def take(self, batch: Batch) -> None:
        """Hand over what a copy's step brought."""
        touched: dict[OpenRequest, None] = {}
        for item in batch.events:
            open_ = self._open.get(item[0])
            if open_ is not None:  # it may be aborted meanwhile
                open_.stream.put(open_.take(item))
                self._router.note_token(open_.entry)
                self.num_tokens += 1
                touched[open_] = None
        for number, error in batch.ends:
            open_ = self._open.get(number)
            if open_ is not None:
                touched.pop(open_, None)
                self._end(open_, None if error is None else message.rebuilt(*error))
        for open_ in touched:
            open_.stream.notify()
        if batch.ends:
            self._assign()

    def _end(self, open_: OpenRequest, error: Exception | None) -> None:
        del self._open[open_.number]
        if (timer := self._timers.pop(open_.number, None)) is not None:
            timer.cancel()
        left = []
        if self._hash_blocks is not None and error is None:
            left = open_.full_blocks(self._hash_blocks, self._block_size)
        self._router.finish(open_.entry, left)
        self.num_ended += 1
        open_.on_end()
        open_.stream.finish(error)
        open_.stream.notify()
        self._ended.set()

    def _assign(self) -> None:
        for entry, copy_id in self._router.assign():
            open_ = self._open[entry.number]
            self._copies[copy_id].open(entry.number, open_.request, open_.handover())
            if entry.left_id is not None and entry.left_id in self._copies:
                self._copies[entry.left_id].unpin(entry.session)
