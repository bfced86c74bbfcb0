"""Copies of a model, each with an engine in a process of its own, behind one process that makes
requests of texts, chooses a copy for each, and hands over what comes back.

A request is its token ids, parameters, seed and what was generated so far. So one whose copy is
lost goes on in another by the same bits: its reader sees a pause.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from lmi_core import _native
from lmi_core.copies.adapters import SharedAdapters
from lmi_core.copies.autoscale import IDLE_S, Autoscaler, Autoscaling
from lmi_core.copies.dispatch import Dispatch, HashBlocks
from lmi_core.copies.link import Link, to_the_end
from lmi_core.copies.machines import Machines, ThisMachine, check_alike
from lmi_core.copies.opening import Opening
from lmi_core.copies.outbox import Batch, observe_again
from lmi_core.copies.process import CopyProcess, CopySettings
from lmi_core.copies.supervisor import Supervisor
from lmi_core.engine.fingerprint import FingerprintOf
from lmi_core.engine.intake import Intake, check_num_tokens, check_room, prompt_of, retry_after_s
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.parts import load_tokenizer
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.stats import (
    EngineInfo,
    EngineObserver,
    EngineStats,
    EngineTotals,
    LifeState,
    NullObserver,
)
from lmi_core.engine.stream import EventStream, batches
from lmi_core.errors import EngineError, UserError
from lmi_core.runners.step_memory import prefix_hash_key
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_SPARE_PARTS = 4
"""A copy has a fourth more sequences than it runs, so that a free row is taken at once."""
_SILENT_S, _DEAD_S = 10.0, 60.0
"""A copy with requests that says nothing for so long is asked, and then ended."""


class Copies:
    """To a server what ``Engine`` is, by several of them. ``async with`` starts and ends them."""

    def __init__(
        self,
        config: EngineConfig,
        num_copies: int,
        most_copies: int = 0,
        *,
        idle_s: float = IDLE_S,
        observer: EngineObserver | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        machines: Machines | None = None,
    ) -> None:
        """``config``: of one copy; the cores are divided where it names no number of threads, the
        memory for KV caches where it names no size. ``most_copies``: above ``num_copies``: so many
        at most by load, and fewer again after ``idle_s``. ``machines``: None: this one."""
        if num_copies < 1:
            raise UserError(f"num_copies is {num_copies}; at least 1 is needed", field="num_copies")
        self._machines = machines or ThisMachine()
        self.config = replace(config, prefix_key=prefix_hash_key(config.prefix_cache_dir))
        self._observer = observer or NullObserver()
        self._supervisor = Supervisor(self, num_copies, progress)
        scaler = Autoscaler(num_copies, max(num_copies, most_copies), idle_s)
        self._autoscaling = Autoscaling(
            scaler,
            lambda: self._dispatch.demand(self._info.runner),
            lambda: self._supervisor.num_wanted,
            self._scale,
        )
        self._state = LifeState.CREATED
        self._adapters = SharedAdapters(config.lora, outlast=config.prefix_cache_dir is not None)
        self._num_encoding = 0
        self._gone = EngineTotals()
        """What copies that are gone have done."""
        self._started_s = time.monotonic()
        self._watching: asyncio.TimerHandle | None = None
        # These follow from the first copy that is ready.
        self._dispatch: Dispatch
        self._info: EngineInfo
        self._tokenizer: Tokenizer
        self._intake: Intake
        self._opening: Opening
        self._fingerprint: FingerprintOf | None = None
        self._shares_weights = False

    async def __aenter__(self) -> Self:
        if self._state is not LifeState.CREATED:
            raise EngineError(f"the copies are {self._state}; they can be started once")
        self._state = LifeState.LOADING
        try:
            await self._claim(self._supervisor.num_wanted)
            await self._adapters.start()
            await self._supervisor.start()
        except BaseException:
            await self._close()
            raise
        self._state = LifeState.READY
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._state is LifeState.STOPPED:
            return
        self._state = LifeState.DRAINING
        await self._autoscaling.stop()
        if kind is None and not self._supervisor.has_failed:
            await self._dispatch.idle()
        self._dispatch.abort_all()
        await self._supervisor.stop(kill=False)
        await self._close()

    async def _close(self) -> None:
        self._state = LifeState.STOPPED
        if self._watching is not None:
            self._watching.cancel()
        if self._fingerprint is not None:
            await asyncio.to_thread(self._fingerprint.close)
            self._tokenizer.close()
        self._machines.release()

    async def subscribe(
        self, request: GenerationRequest, notify: Callable[[], None]
    ) -> EventStream:
        """As ``Engine.subscribe``. Errors that only a copy finds are raised by the stream."""
        arrival_s = time.monotonic()
        self._check_accepting()
        await self._intake.check(request)
        info, limit_s = self._info, self.config.max_queue_s
        vocab_size = info.runner.vocab_size
        request = request.completed(vocab_size=vocab_size, max_queue_s=limit_s)
        num_choices = request.params.num_sequences
        self._check_room(num_choices)
        self._num_encoding += num_choices
        try:
            prompt = await prompt_of(
                request,
                self._tokenizer,
                info.head,
                max_tokens=info.max_prompt_tokens,
                vocab_size=vocab_size,
            )
        finally:
            self._num_encoding -= num_choices
        num_open_tokens = self._opening.num_prompt_tokens
        check_num_tokens(len(prompt.ids), num_choices, num_open_tokens, lambda: self._hint_s(1))
        self._check_accepting()
        self._check_id(request.request_id)
        open_ = self._opening.open(request, prompt, EventStream(notify), arrival_s)
        open_.stream.abort = lambda _: self._dispatch.abort(open_)
        open_.stream.prompt_ids = prompt.ids
        self._dispatch.put(open_)
        self._watch()
        self._autoscaling.wake()
        return open_.stream

    def generate_batches(
        self, request: GenerationRequest
    ) -> AsyncGenerator[list[TokenEvent], None]:
        """As ``Engine.generate_batches``."""
        return batches(self, request)

    def abort(self, request_id: str) -> None:
        """End a request at any moment; its reader gets a last event."""
        self._dispatch.abort_request(request_id)

    def unpin(self, session: str) -> None:
        """As ``Engine.unpin``, in every copy."""
        self._dispatch.unpin(session)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        self._intake.check_token_ids(token_ids)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def load_adapter(self, name: str, path: Path | str) -> None:
        """As ``Engine.load_adapter``, in every copy."""
        self._check_accepting()
        await self._adapters.load(name, Path(path), lambda: self.copies)

    async def unload_adapter(self, name: str) -> None:
        """As ``Engine.unload_adapter``, in every copy."""
        await self._adapters.unload(name, lambda: self.copies)

    @property
    def adapters(self) -> dict[str, Path]:
        return self._adapters.paths

    @property
    def fingerprint(self) -> str | None:
        """As ``Engine.fingerprint``."""
        return None if self._fingerprint is None else self._fingerprint.text

    def adapter_digest(self, name: str) -> str:
        """As ``Engine.adapter_digest``."""
        adapter = self._adapters.find(name)
        return "" if adapter is None else adapter.digest

    @property
    def healthy(self) -> bool:
        """Whether it takes requests, be it that they wait until a lost copy is replaced."""
        return self._state is LifeState.READY and not self._supervisor.has_failed

    @property
    def lacks_workers(self) -> bool:
        """Whether fewer copies run than always should."""
        return len(self._supervisor.copies) < self._autoscaling.scaler.least

    @property
    def copies(self) -> list[CopyProcess]:
        """Those that take requests now."""
        return self._supervisor.copies

    @property
    def info(self) -> EngineInfo:
        """Of all copies together; packed weights that they share count once."""
        num, runner = self._supervisor.num_wanted, self._info.runner
        names = ["max_num_seqs", "num_blocks", "kv_cache_bytes", "arena_bytes", "num_threads"]
        if not self._shares_weights:
            names.append("weight_bytes")
        return replace(
            self._info,
            runner=replace(runner, **{name: num * getattr(runner, name) for name in names}),
        )

    @property
    def max_model_len(self) -> int:
        return self._info.max_total_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def stats(self) -> EngineStats:
        """Sums over the copies, of which each speaks up within 0.2 s of what it did."""
        known = [copy.stats for copy in self._supervisor.copies if copy.stats is not None]
        names = ("num_running", "num_blocks", "num_used_blocks", "num_cached_blocks")
        sums = {name: sum(getattr(s, name) for s in known) for name in (*names, "num_free_blocks")}
        waiting = self._dispatch.num_waiting + sum(s.num_waiting for s in known)
        return EngineStats(
            state=self._state,
            is_healthy=self.healthy,
            num_waiting=waiting + self._num_encoding,
            totals=EngineTotals.sum([self._gone, *(s.totals for s in known)]),
            **sums,
        )

    @property
    def num_tokens(self) -> int:
        """Handed over since the start."""
        return self._dispatch.num_tokens

    @property
    def num_resumed(self) -> int:
        """Times that a request which had begun went on in another copy."""
        return self._dispatch.num_resumed

    @property
    def worker_starts(self) -> list[float]:
        """When the copies that take requests were started, in seconds since the epoch."""
        return [copy.started_at for copy in self._supervisor.copies]

    async def scale(self, min_workers: int, max_workers: int) -> None:
        """Run ``min_workers`` copies, of 0 one, from now on, in the background, and up to
        ``max_workers`` by load. InsufficientMemoryError or TooManyCopiesError where the first don't
        fit, and all stays as it was."""
        self._check_accepting()
        await self._autoscaling.set_bounds(max(1, min_workers), max_workers)

    # What the supervisor asks and says.

    async def settings(self, number: int, *, is_first: bool) -> CopySettings:
        config = replace(self.config, lora=self._adapters.config)
        asked = partial(self._machines.settings, config, number, self._supervisor.num_wanted)
        return await asyncio.to_thread(asked, is_first=is_first)

    def link(self, settings: CopySettings) -> Link:
        return self._machines.link(settings)

    async def prepare(self, copy: CopyProcess, info: EngineInfo) -> None:
        if not hasattr(self, "_info"):
            await self._learn(info)
        check_alike(self._info.runner, info.runner, copy.link.name)
        await self._adapters.bring(copy)

    def on_up(self, copy: CopyProcess) -> None:
        assert copy.stats is not None
        num_rows = self._info.runner.max_num_seqs
        room = num_rows + -(-num_rows // _SPARE_PARTS)
        self._dispatch.add_copy(copy, room=room, num_blocks=copy.stats.num_blocks)

    def on_batch(self, copy: CopyProcess, batch: Batch) -> None:
        self._dispatch.take(batch)
        observe_again(self._observer, batch)
        if batch.ends:
            self._supervisor.note_success()

    def on_down(self, copy: CopyProcess) -> None:
        if copy.stats is not None:
            self._gone = EngineTotals.sum([self._gone, copy.stats.totals])
        self._dispatch.remove_copy(copy)

    async def on_leaving(self, copy: CopyProcess) -> None:
        await self._dispatch.drain_copy(copy)
        if self._dispatch.has_copy(copy):
            self.on_down(copy)

    def on_failed(self) -> None:
        self._dispatch.fail_all(EngineError("every copy of the model has failed"))

    async def _learn(self, info: EngineInfo) -> None:
        """Take over from the first copy what is the same in all."""
        runner = info.runner
        self._info = info
        self._tokenizer = await asyncio.to_thread(load_tokenizer, self.config, runner.vocab_size)
        self._fingerprint = FingerprintOf(self.config, runner)
        await asyncio.to_thread(self._fingerprint.start)
        self._intake = Intake(info, self._tokenizer, self.config, self._adapters.find)
        key = self.config.prefix_key
        assert key is not None
        hash_blocks: HashBlocks | None = None
        if self.config.enable_prefix_caching and runner.caches_prefixes:
            hash_blocks = _native.BlockPool(1, runner.block_size, key).hash_blocks
        self._opening = Opening(
            hash_blocks,
            self._adapters,
            seed=self.config.seed,
            max_total_tokens=info.max_total_tokens,
        )
        self._dispatch = Dispatch(runner.block_size, hash_blocks)

    async def _scale(self, num_copies: int) -> None:
        await self._claim(num_copies)
        self._supervisor.scale(num_copies)

    async def _claim(self, num_copies: int) -> None:
        """Raise as ``Machines.claim`` unless all copies fit; then what they need is theirs."""
        self._shares_weights = await to_the_end(self._machines.claim, self.config, num_copies)

    def _check_accepting(self) -> None:
        if self._state is not LifeState.READY:
            raise EngineError(f"the copies are {self._state}, they take no new requests")
        if self._supervisor.has_failed:
            raise EngineError("every copy of the model has failed; restart the server")

    def _check_room(self, num_choices: int) -> None:
        num_rows = self._supervisor.num_wanted * self._info.runner.max_num_seqs
        num_waiting = self._dispatch.num_seqs + self._num_encoding - num_rows
        check_room(num_choices, num_waiting, self.config.max_queue_size, self._hint_s)

    def _check_id(self, request_id: str) -> None:
        if self._dispatch.has_request(request_id):
            raise UserError(f"request id {request_id!r} is in use", field="request_id")

    def _hint_s(self, num_waiting: int) -> float:
        seconds = time.monotonic() - self._started_s
        return retry_after_s(num_waiting, self._dispatch.num_ended, seconds)

    def _watch(self) -> None:
        """Look after copies for as long as there are requests."""
        if self._watching is None:
            loop = asyncio.get_running_loop()
            self._watching = loop.call_later(_SILENT_S / 2, self._look)

    def _look(self) -> None:
        self._watching = None
        for copy in self._supervisor.copies:
            if copy.unanswered_s > _DEAD_S:
                log.error("copy %d hasn't said anything for a while and is ended", copy.copy_id)
                copy.kill()
            elif copy.silent_s > _SILENT_S:
                copy.ask()
        if len(self._dispatch):
            self._watch()
