"""From committed tokens to events: text, stop strings, log-probabilities; one wake-up a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from lmi_core.engine.beam_search import BeamSearch
from lmi_core.engine.nothing_left import why_nothing_is_left
from lmi_core.engine.outputs import FinishReason, PromptTokens, TokenEvent, TokenLogprob
from lmi_core.engine.plan import Plan, PromptChunk
from lmi_core.engine.ranked_tokens import Ranked
from lmi_core.engine.scheduler import Scheduler
from lmi_core.engine.sequence import ActiveRequest, Sequence
from lmi_core.engine.shown_text import shown_text
from lmi_core.engine.stats import EngineObserver, EngineTotals, observe
from lmi_core.engine.stream import EventStream
from lmi_core.errors import EngineError
from lmi_core.models.pooling_head import PoolingHead
from lmi_core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lmi_core._native import Step

_log = logging.getLogger(__name__)

MANY_READERS = 16
LATEST_S = 0.005
MOST_AT_ONCE = 64
"""Readers told in one turn of the loop: of texts that end together, each makes an answer."""
_RANKED_AT_ONCE = 4096
"""Likely tokens that are named and shown before others get their turn: some 10 ms."""


class Delivery:
    """Has the open requests: turns committed steps into events of their streams, while the next one
    runs, and tells their readers."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        totals: EngineTotals,
        observer: EngineObserver,
        head: PoolingHead | None = None,
        *,
        vocab_size: int,
    ) -> None:
        """``head``: of a model that pools; ``vocab_size``: of its logits."""
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._special_ids = tokenizer.special_ids
        self.requests: dict[str, ActiveRequest] = {}
        """The open ones by id."""
        self.num_prompt_tokens = 0
        """Of the open ones together."""
        self._totals = totals
        self._observer = observer
        self._head = head
        self._vocab_size = vocab_size
        self._untold: dict[EventStream, None] = {}
        """Those whose readers aren't told yet of what there is."""
        self._told_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._num_ranked = 0
        """Likely tokens that were named since others had a turn."""

    def open(self, request: ActiveRequest) -> None:
        """Deliver its events from now on, until it ends."""
        self.requests[request.request_id] = request
        self.num_prompt_tokens += request.num_prompt_tokens

    async def deliver(self, plan: Plan) -> None:
        """Put the events of one step. Where they name many likely tokens, readers are told of some
        of them at a time, and whoever has ended meanwhile gets no more."""
        for chunk in plan.prompt_chunks:
            await self._collect_prompt(chunk, plan.step)
        touched: dict[EventStream, None] = {}
        intervals_s: list[float] = []
        await self._put_tokens(plan, touched, intervals_s)
        for sequence in plan.pooled:
            request = sequence.request
            if request.request_id in self.requests:
                touched[request.stream] = None
                self._put_pooled(sequence, plan.completed_s)
        for request in plan.searches:
            if request.request_id in self.requests:
                touched[request.stream] = None
                self._put_search(request, plan.completed_s)
        observe(self._observer.on_token_intervals, intervals_s)
        # A text's first token has no interval before it.
        self.tell(touched, at_once=len(intervals_s) < len(plan.outputs))

    async def _put_tokens(
        self, plan: Plan, touched: dict[EventStream, None], intervals_s: list[float]
    ) -> None:
        """Note whose streams have events, and what time went by since the tokens before."""
        now_s, open_requests = plan.completed_s, self.requests
        for sequence, token_id, logit_row, num_generated, reason, known in plan.outputs:
            if self._num_ranked >= _RANKED_AT_ONCE:
                self.tell(touched, at_once=True)
                touched.clear()
                await self._give_turns()
            request = sequence.request
            if sequence.is_delivered or request.request_id not in open_requests:
                continue
            touched[request.stream] = None
            try:
                if sequence.error is not None or token_id < 0:
                    self.fail(request, why_nothing_is_left(sequence, self._vocab_size))
                    continue
                last_s, sequence.last_token_s = sequence.last_token_s, now_s
                if last_s:
                    intervals_s.append(now_s - last_s)
                else:
                    self._observe_first(sequence, now_s)
                self._totals.num_generated_tokens += 1
                event = self._token_event(sequence, token_id, num_generated, reason)
                num_top = request.request.params.logprobs
                if num_top is not None:
                    event.token = self._tokenizer.token_text(token_id)
                    if known is None:
                        event.logprob = plan.step.logprob(logit_row)
                        event.top = self._top(plan.step, logit_row, num_top)
                    else:
                        event.logprob, event.top = known[0], self._shown(known[1][:num_top])
                request.stream.put(event)
                if event.finish_reason is not None:
                    self._end_choice(sequence, event.finish_reason, num_generated)
            except Exception as error:  # one request's text must not end the others
                _log.exception("request %s failed in delivery", request.request_id)
                self.fail(request, EngineError(f"delivering a token failed: {error}"))

    def tell(self, streams: Iterable[EventStream], *, at_once: bool) -> None:
        """Tell readers of a step's events, at once or with those of the next steps; ``at_once``:
        some can't wait.

        Telling one has its frame made and sent, which costs more than all else that the loop does
        for a token, and the same for several tokens. So where a step has many readers, and they
        were told less than ``LATEST_S`` ago, which nobody sees, they wait until then; steps that
        take longer are told of at once.
        """
        untold = self._untold
        num_before = len(untold)
        untold.update(dict.fromkeys(streams))
        if not untold:
            return
        left_s = self._told_s + LATEST_S - time.monotonic()
        if at_once or left_s <= 0 or len(untold) < MANY_READERS:
            self._tell_all()
        elif not num_before:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._tell_all)

    def _tell_all(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._told_s = time.monotonic()
        streams, self._untold = list(self._untold), {}
        self._tell_some(streams)

    def _tell_some(self, streams: list[EventStream]) -> None:
        for stream in streams[:MOST_AT_ONCE]:
            stream.notify()
        if rest := streams[MOST_AT_ONCE:]:
            asyncio.get_running_loop().call_soon(self._tell_some, rest)

    def abort(self, request: ActiveRequest) -> None:
        """End a request early: a last event for every open choice."""
        if not self._remove(request):
            return
        self._scheduler.finish_all(request.sequences)
        for sequence in request.sequences[: request.request.params.n]:
            if not sequence.is_delivered:
                sequence.is_delivered = True
                event = _event_without_token(sequence)
                event.num_generated_tokens = sequence.num_generated
                event.finish_reason = FinishReason.ABORT
                request.stream.put(event)
        self._finish(request, FinishReason.ABORT, None)
        request.stream.notify()

    def fail(self, request: ActiveRequest, error: Exception) -> None:
        """End a request with an error, after the events it has."""
        if not self._remove(request):
            return
        self._scheduler.finish_all(request.sequences)
        self._finish(request, None, error)
        request.stream.notify()

    def fail_all(self, error: Exception) -> None:
        """End every request; the scheduler, which may be inconsistent, isn't told."""
        for request in self.requests.values():
            request.stream.finish(error)
            request.stream.notify()
        self.requests.clear()

    def _remove(self, request: ActiveRequest) -> bool:
        """Whether it was open."""
        if self.requests.pop(request.request_id, None) is None:
            return False
        self.num_prompt_tokens -= request.num_prompt_tokens
        return True

    def put_prompt(self, request: ActiveRequest) -> None:
        """The first event of a request that asked for its prompt back."""
        event = _event_without_token(request.sequences[0])
        text_of = self._tokenizer.token_text
        event.prompt = PromptTokens(request.prompt_ids, text_of, request.prompt_scores)
        event.seed = request.reported_seed
        request.stream.put(event)

    def _finish(
        self, request: ActiveRequest, reason: FinishReason | None, error: Exception | None
    ) -> None:
        self._totals.num_finished_requests += 1
        if error is None:
            observe(self._observer.on_request, request.record())
        observe(self._observer.on_finish, reason)
        request.stream.finish(error)

    def _token_event(
        self,
        sequence: Sequence,
        token_id: int,
        num_generated: int,
        reason: FinishReason | None,
    ) -> TokenEvent:
        """Without log-probabilities; its text may end the choice."""
        request = sequence.request
        stop: str | int | None = None
        if reason is None and sequence.stop_matcher is None:
            text = sequence.detokenizer.push(token_id)
        else:
            text, reason, stop = shown_text(
                token_id,
                reason,
                request.request.params,
                sequence.detokenizer,
                sequence.stop_matcher,
                is_end=token_id in sequence.end_ids,
            )
        # By position, as there is one for every token: names take twice as long.
        event = TokenEvent(
            request.request_id,
            sequence.choice,
            token_id,
            text,
            token_id in self._special_ids,
            sequence.num_prompt,
            request.num_cached_tokens or 0,
            num_generated,
            reason,
            stop,
            request.reported_seed,
        )
        if num_generated == 1:
            event.queue_seconds = request.queue_seconds
        return event

    def _put_search(self, request: ActiveRequest, now_s: float) -> None:
        """All of a beam search's texts at once, since until its end any may lose."""
        assert isinstance(request.search, BeamSearch)
        wants_logprobs = request.request.params.logprobs is not None
        self._observe_first(request.sequences[0], now_s)
        results = request.search.results or []
        for sequence, result in zip(request.sequences, results, strict=False):
            count = len(result.token_ids)
            num_given = request.num_given[sequence.choice] if request.num_given else 0
            for i, token_id in enumerate(result.token_ids, 1):
                reason = result.reason if i == count else None
                event = self._token_event(sequence, token_id, i, reason)
                if wants_logprobs:
                    event.token = self._tokenizer.token_text(token_id)
                    event.logprob = result.logprobs[i - 1]
                if i == count:
                    event.score = result.score
                if i > num_given:
                    request.stream.put(event)
            self._totals.num_generated_tokens += count
            self._end_choice(sequence, result.reason, count)

    def _put_pooled(self, sequence: Sequence, now_s: float) -> None:
        request = sequence.request
        params, head, row_sum = request.request.pooling, self._head, sequence.row_sum
        assert params is not None
        assert head is not None
        assert row_sum is not None
        pooled = params.result(head, row_sum.pooled(sequence.num_prompt))
        if not np.isfinite(pooled).all():
            self.fail(request, EngineError("what the prompt is pooled to isn't finite"))
            return
        self._observe_first(sequence, now_s)
        event = _event_without_token(sequence)
        event.queue_seconds = request.queue_seconds
        event.finish_reason = FinishReason.POOLED
        event.pooled = pooled
        request.stream.put(event)
        self._end_choice(sequence, FinishReason.POOLED, 0)

    def _end_choice(self, sequence: Sequence, reason: FinishReason, num_generated: int) -> None:
        request = sequence.request
        # A text can end before the last one of several tokens that a step brought.
        del sequence.token_ids[sequence.num_prompt + num_generated :]
        # Of a search, the others go on from it.
        self._scheduler.finish_all([sequence] if request.search is None else request.sequences)
        sequence.is_delivered = True
        request.num_open -= 1
        if not request.num_open:
            self._remove(request)
            self._finish(request, reason, None)
            request.stream.notify()

    def _observe_first(self, sequence: Sequence, now_s: float) -> None:
        if sequence.choice == 0:
            self._totals.num_cached_tokens += sequence.request.num_cached_tokens or 0
            observe(self._observer.on_first_token, now_s - sequence.request.arrival_s)

    async def _give_turns(self) -> None:
        self._num_ranked = 0
        await asyncio.sleep(0)

    async def _collect_prompt(self, chunk: PromptChunk, step: Step) -> None:
        request = chunk.request
        num_top = request.request.params.prompt_logprobs or 0
        for i in range(chunk.num_tokens):
            if self._num_ranked >= _RANKED_AT_ONCE:
                await self._give_turns()
            row = chunk.logit_row + i
            request.prompt_scores[chunk.start + i] = (
                step.logprob(row),
                self._top(step, row, num_top),
                step.target_rank(row) or None,
            )
        if chunk.is_last and request.request_id in self.requests:
            self.put_prompt(request)

    def _top(self, step: Step, logit_row: int, num_top: int) -> tuple[TokenLogprob, ...]:
        return self._shown(step.top(logit_row)[:num_top]) if num_top else ()

    def _shown(self, ranked: Ranked) -> tuple[TokenLogprob, ...]:
        self._num_ranked += len(ranked)
        text_of = self._tokenizer.token_text
        return tuple(TokenLogprob(token_id, text_of(token_id), value) for token_id, value in ranked)


def _event_without_token(sequence: Sequence) -> TokenEvent:
    """Of a request as a whole, or of one choice's end."""
    return TokenEvent(
        request_id=sequence.request.request_id,
        choice=sequence.choice,
        token_id=-1,
        text="",
        num_prompt_tokens=sequence.num_prompt,
        num_cached_tokens=sequence.request.num_cached_tokens or 0,
    )
