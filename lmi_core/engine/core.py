"""The loaded engine on one event loop: requests in, events out."""

from __future__ import annotations

import asyncio
import collections.abc as abc
import itertools
import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from lmi_core.engine.delivery import Delivery
from lmi_core.engine.handover import Handover, resume
from lmi_core.engine.intake import (
    Intake,
    check_num_tokens,
    check_room,
    derived_seed,
    logit_biases,
    prompt_of,
    retry_after_s,
)
from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.loop import StepLoop
from lmi_core.engine.lora_slots import LoraSlots
from lmi_core.engine.paged_policy import PagedPolicy
from lmi_core.engine.parts import EngineParts
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.restore import PrefixRestore
from lmi_core.engine.scheduler import Scheduler
from lmi_core.engine.searches import search_of
from lmi_core.engine.sequence import ActiveRequest, Sequence
from lmi_core.engine.speculation import speculation_of
from lmi_core.engine.stats import EngineInfo, EngineObserver, EngineStats, EngineTotals, LifeState
from lmi_core.engine.stream import EventStream
from lmi_core.errors import EngineError, UserError
from lmi_core.models.pooling_head import RowSum
from lmi_core.runners.runner import BlockRunner, PoolingRunner, RankedRunner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.structured.banned_sequences import BannedSequences
from lmi_core.structured.compiler import GrammarCompiler
from lmi_core.text.framed_text import WholeText
from lmi_core.text.stop import stop_strings

_log = logging.getLogger(__name__)


class EngineCore:
    """Checks and admits requests, and owns everything that runs them. All methods are called in the
    thread of the event loop that created it.
    """

    def __init__(
        self,
        config: EngineConfig,
        parts: EngineParts,
        observer: EngineObserver,
        adapters: LoraSlots,
        grammars: GrammarCompiler,
        *,
        check_integrity: bool = False,
    ) -> None:
        runner, tokenizer = parts.runner, parts.tokenizer
        runner.info.check_capacities()
        self._config = config
        self._runner = runner
        self.adapters = adapters
        self.tokenizer = tokenizer
        keeps_all = config.guaranteed_no_evict or not runner.info.continues_prompts
        self._memory = KvMemory(
            runner,
            enable_prefix_caching=config.enable_prefix_caching,
            guaranteed_no_evict=keeps_all,
        )
        self._restore = self._memory.restore = None
        if parts.disk is not None:
            cache = cast(BlockRunner, runner).cache
            self._restore = self._memory.restore = PrefixRestore(runner.pool, cache, parts.disk)
        self._restoring: set[asyncio.Task[None]] = set()
        policy = PagedPolicy(
            runner.info,
            self._memory,
            guaranteed_no_evict=keeps_all,
            waiting_steps=config.waiting_steps,
        )
        self._totals = EngineTotals()
        speculation = speculation_of(config.speculation, runner, self._memory, self._totals)
        self._scheduler = Scheduler(self._memory, policy, speculation)
        pools = runner.info.pooling is not None
        self._head = cast(PoolingRunner, runner).head if pools else None
        self._delivery = Delivery(
            self._scheduler,
            tokenizer,
            self._totals,
            observer,
            self._head,
            vocab_size=runner.info.vocab_size,
        )
        self._loop = StepLoop(
            self._scheduler,
            runner,
            self._delivery,
            self._totals,
            observer,
            overlap=config.overlap,
            check_integrity=check_integrity,
            costs=None if speculation is None else speculation.costs,
        )
        self._grammars = grammars
        self._num_encoding = 0
        self._num_encoding_sequences = 0
        self._started_s = time.monotonic()
        self.state = LifeState.READY
        max_total_tokens = min(runner.info.max_model_len, self._memory.num_max_tokens)
        self.info = EngineInfo(
            model=config.served_model_name,
            max_prompt_tokens=max_total_tokens - (not pools),
            max_total_tokens=max_total_tokens,
            eos_token_ids=parts.eos_token_ids,
            runner=runner.info,
            head=self._head,
        )
        self._intake = Intake(self.info, tokenizer, config, adapters.find)
        self._arrivals = itertools.count()
        self._task = asyncio.get_running_loop().create_task(self._loop.run())

    @property
    def healthy(self) -> bool:
        if self._runner.info.num_ranks > 1 and cast(RankedRunner, self._runner).is_lost:
            return False
        return self._loop.is_healthy

    async def open(
        self, request: GenerationRequest, stream: EventStream, handover: Handover | None = None
    ) -> None:
        """Check a request and queue it; its events go to ``stream``. One that was handed over is
        queued by who has done so.

        Raises UserError, CapacityError when the queue is full, EngineError when not running.
        """
        arrival_s = time.monotonic()
        self._check_accepting()
        await self._intake.check(request)
        request = request.completed(
            vocab_size=self._runner.info.vocab_size, max_queue_s=self._config.max_queue_s
        )
        self._check_id(request.request_id)
        if handover is None:
            self._check_queue(request.params.num_sequences)
        active = await self._prepared(request, stream, arrival_s, handover)
        stream.prompt_ids = active.prompt_ids
        is_resumed = handover is not None and handover.is_resumed
        if not is_resumed:
            self._totals.num_requests += 1
            self._totals.num_prompt_tokens += len(active.prompt_ids)
        self._delivery.open(active)
        stored = [] if is_resumed else self._stored_hashes(active.sequences[0])
        self._scheduler.add(active.sequences, is_restoring=bool(stored))
        if stored:
            task = asyncio.get_running_loop().create_task(self._bring_back(active, stored))
            self._restoring.add(task)
            task.add_done_callback(self._restoring.discard)
        had_prompt = handover is not None and handover.had_prompt
        if request.echo and not active.is_scoring_prompt and not had_prompt:
            self._delivery.put_prompt(active)
            stream.notify()
        self._loop.wake()
        stream.abort = partial(self.abort, request.request_id)

    def abort(self, request_id: str, stream: EventStream | None = None) -> None:
        """End a request; does nothing when it has ended, or when ``stream`` isn't its own."""
        request = self._delivery.requests.get(request_id)
        if request is not None and stream in (None, request.stream):
            self._delivery.abort(request)

    async def load_adapter(self, name: str, path: Path) -> None:
        """Register a LoRA adapter; see ``LoraSlots.load``."""
        self._check_accepting()
        await self.adapters.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Refuse an adapter to new requests, wait for its running ones and free its memory."""
        freed = asyncio.Event()
        self.adapters.unregister(name, freed.set)
        waiting = asyncio.ensure_future(freed.wait())
        await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not freed.is_set():
            raise EngineError(f"the engine stopped before adapter {name} was unloaded")

    def stats(self) -> EngineStats:
        pool = self._runner.pool
        totals = replace(self._totals, num_preemptions=self._scheduler.num_preemptions)
        return EngineStats(
            state=self.state,
            is_healthy=self.healthy,
            num_running=self._scheduler.num_running,
            num_waiting=self._num_waiting(),
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_free_blocks=pool.num_free,
            totals=totals,
        )

    async def stop(self, *, drain: bool, timeout_s: float | None = None) -> None:
        """Refuse new requests, finish or abort the open ones, wait for the step in flight, close
        the runner. After ``timeout_s`` of draining, the rest is aborted."""
        if self.state is LifeState.STOPPED:
            return
        self.state = LifeState.DRAINING
        if not drain:
            self._abort_all()
        self._loop.stop()
        try:
            done, _ = await asyncio.wait([self._task], timeout=timeout_s)
            if not done:
                self._abort_all()
                await asyncio.wait([self._task])
        finally:
            self._abort_all()
            for task in list(self._restoring):
                task.cancel()
            await asyncio.gather(*self._restoring, return_exceptions=True)
            self._task.cancel()
            self._loop.detach()
            self._runner.close()
            self._grammars.close()
            self.tokenizer.close()
            self.state = LifeState.STOPPED

    def _abort_all(self) -> None:
        for request in list(self._delivery.requests.values()):
            self._delivery.abort(request)

    async def _prepared(
        self,
        request: GenerationRequest,
        stream: EventStream,
        arrival_s: float,
        handover: Handover | None,
    ) -> ActiveRequest:
        """As ``_active``; counts as waiting meanwhile."""
        num_sequences = request.params.num_sequences
        self._num_encoding += 1
        self._num_encoding_sequences += num_sequences
        try:
            prompt = await prompt_of(
                request,
                self.tokenizer,
                self._head,
                max_tokens=self.info.max_prompt_tokens,
                vocab_size=self._runner.info.vocab_size,
            )
            if handover is None:
                self._check_num_tokens(len(prompt.ids), num_sequences)
            return await self._active(request, prompt, stream, arrival_s, handover)
        finally:
            self._num_encoding -= 1
            self._num_encoding_sequences -= num_sequences

    async def _active(
        self,
        request: GenerationRequest,
        prompt: WholeText,
        stream: EventStream,
        arrival_s: float,
        handover: Handover | None,
    ) -> ActiveRequest:
        """With its sequences and all that these are kept to, where it was if it had begun."""
        params, intake, num_prompt = request.params, self._intake, len(prompt.ids)
        compiled = await intake.compiled(params, prompt.ids, self._grammars)
        search = search_of(
            params,
            intake.end_ids(params),
            self._runner.info,
            num_prompt=num_prompt,
            max_len=intake.max_len(params, num_prompt),
            bans=compiled if isinstance(compiled, BannedSequences) else None,
        )
        stops = await stop_strings(params.stop)
        biases = await logit_biases(params)
        # Nothing waits from here on: requests are numbered in the order in which they are admitted.
        self._check_accepting()
        self._check_id(request.request_id)
        known = handover or self._handover(request, prompt, arrival_s)
        active = ActiveRequest(
            request,
            prompt.ids,
            adapter=self.adapters.find(request.adapter),
            prefix_seed=known.prefix_seed,
            biases=biases,
            seed=derived_seed(self._config.seed, self._totals.num_requests)
            if params.seed is None
            else params.seed,
            arrival_s=known.arrival_s,
            stream=stream,
        )
        active.search = search
        matched = None if search else compiled  # a search keeps to it itself
        active.sequences = intake.sequences(active, matched, stops, known)
        if self._head is not None:
            active.sequences[0].row_sum = RowSum(self._head.spec.rows)
            if self._head.spec.tells_pairs_apart:
                active.sequences[0].num_first = known.num_first
        if known.is_resumed:
            resume(active, known)
        return active

    def _handover(
        self, request: GenerationRequest, prompt: WholeText, arrival_s: float
    ) -> Handover:
        """What comes with a request from elsewhere."""
        adapter = self.adapters.find(request.adapter)
        prefix_seed = request.prefix_seed(b"" if adapter is None else adapter.prefix_seed)
        return Handover(
            order=next(self._arrivals),
            arrival_s=arrival_s,
            prefix_seed=prefix_seed,
            hashes=tuple(self._memory.hash_prompt(prompt.ids, prefix_seed)),
            num_first=prompt.num_first,
        )

    def _stored_hashes(self, sequence: Sequence) -> list[bytes]:
        """Of blocks that a sequence may share, if the disk has some that the pool hasn't."""
        if self._restore is None:
            return []
        hashes = self._memory.usable_hashes(sequence)
        return hashes if self._restore.wanted(hashes) > 0 else []

    async def _bring_back(self, active: ActiveRequest, hashes: list[bytes]) -> None:
        """Let a request run once what the disk has of its prefix is in the pool."""
        assert self._restore is not None
        try:
            await self._restore.restore(hashes)
        except Exception:
            _log.exception("request %s: its prefix can't be restored", active.request_id)
        finally:
            self._scheduler.restored(active)
            self._loop.wake()

    def hold(self, *, is_held: bool) -> None:
        self._loop.hold(is_held=is_held)

    def unpin(self, session: str) -> None:
        """Let go of the blocks that are kept for a session, and keep none of what runs for it."""
        for active in self._delivery.requests.values():
            if active.request.session == session:
                active.request = replace(active.request, session="")
        self._memory.pinned.unpin(session)

    def _check_accepting(self) -> None:
        if self.state is not LifeState.READY:
            raise EngineError(f"the engine is {self.state}, it takes no new requests")
        if not self.healthy:
            raise EngineError("the engine is unhealthy after failed steps; restart it")

    def _check_id(self, request_id: str) -> None:
        if request_id in self._delivery.requests:
            raise UserError(f"request id {request_id!r} is in use", field="request_id")

    def check_token_ids(self, token_ids: abc.Sequence[int]) -> None:
        """Raise UserError naming the first id that the model doesn't have."""
        self._intake.check_token_ids(token_ids)

    def _check_queue(self, num_choices: int) -> None:
        num_waiting = self._scheduler.num_waiting + self._num_encoding_sequences
        # Those for whom there is room don't wait for more than the next step.
        num_waiting -= self._memory.num_free_rows
        check_room(num_choices, num_waiting, self._config.max_queue_size, self._retry_after_s)

    def _check_num_tokens(self, num_prompt_tokens: int, num_choices: int) -> None:
        delivery = self._delivery
        check_num_tokens(
            num_prompt_tokens,
            num_choices,
            delivery.num_prompt_tokens,
            lambda: self._retry_after_s(len(delivery.requests)),
        )

    def _num_waiting(self) -> int:
        # A stop text ends a request before the scheduler hears of it.
        num_others = len(self._delivery.requests) - self._scheduler.num_running_requests
        return max(0, num_others) + self._num_encoding

    def _retry_after_s(self, num_waiting: int) -> float:
        seconds = time.monotonic() - self._started_s
        return retry_after_s(num_waiting, self._totals.num_finished_requests, seconds)
