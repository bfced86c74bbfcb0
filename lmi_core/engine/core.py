"""The loaded engine on one event loop: requests in, events out."""

from __future__ import annotations

import asyncio
import collections.abc as abc
import hashlib
import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from lmi_core.engine.delivery import Delivery
from lmi_core.engine.disk_blocks import DiskBlocks
from lmi_core.engine.fair_shares import FairShares
from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.loop import StepLoop
from lmi_core.engine.lora_slots import LoraSlot, LoraSlots
from lmi_core.engine.paged_policy import PagedPolicy
from lmi_core.engine.policy import Queues
from lmi_core.engine.pooling_params import PoolingParams, framed_text
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.restore import PrefixRestore
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.scheduler import Scheduler
from lmi_core.engine.sequence import ActiveRequest, OpenRequests, Sequence
from lmi_core.engine.speculation import speculation_of
from lmi_core.engine.stats import EngineInfo, EngineObserver, EngineStats, EngineTotals, LifeState
from lmi_core.engine.stream import EventStream
from lmi_core.errors import CapacityError, ConfigError, EngineError, UserError
from lmi_core.models.pooling_head import RowSum
from lmi_core.runners.runner import BlockRunner, PoolingRunner, Runner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.structured.allowed_tokens import AllowedTokens
from lmi_core.structured.compiler import GrammarCompiler
from lmi_core.structured.matcher import CompiledGrammar
from lmi_core.text.stop import StopMatcher, StopStrings, stop_strings
from lmi_core.text.tokenizer import Tokenizer, WholeText, prompt_too_long

_log = logging.getLogger(__name__)

_MAX_RETRY_AFTER_S = 60.0
_MAX_PROMPT_TOKENS = 1 << 24
"""Of all choices of all open requests together; their lists take 8 bytes each."""


class EngineCore:
    """Checks and admits requests, and owns everything that runs them. All methods are called in the
    thread of the event loop that created it.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        eos_token_ids: tuple[int, ...],
        observer: EngineObserver,
        adapters: LoraSlots,
        grammars: GrammarCompiler,
        *,
        check_integrity: bool = False,
        disk: DiskBlocks | None = None,
    ) -> None:
        """``disk``: where KV blocks are kept beyond memory and restarts."""
        _check_capacities(runner)
        self._config = config
        self._runner = runner
        self.adapters = adapters
        self._eos_ids = frozenset(eos_token_ids)
        self.tokenizer = tokenizer
        keeps_all = config.guaranteed_no_evict or not runner.info.continues_prompts
        self._memory = KvMemory(
            runner,
            enable_prefix_caching=config.enable_prefix_caching,
            guaranteed_no_evict=keeps_all,
        )
        queues, shares = Queues(), FairShares()
        self._restore = self._memory.restore = None
        if disk is not None:
            cache = cast(BlockRunner, runner).cache
            self._restore = self._memory.restore = PrefixRestore(runner.pool, cache, disk)
        self._restoring: set[asyncio.Task[None]] = set()
        policy = PagedPolicy(
            runner.info,
            queues,
            self._memory,
            guaranteed_no_evict=keeps_all,
            waiting_steps=config.waiting_steps,
            shares=shares,
        )
        self._totals = EngineTotals()
        speculation = speculation_of(config.speculation, runner.info, self._memory, self._totals)
        self._scheduler = Scheduler(queues, self._memory, policy, speculation, shares)
        self._requests = OpenRequests()
        self._pools = runner.info.pooling is not None
        self._head = cast(PoolingRunner, runner).head if self._pools else None
        self._delivery = Delivery(
            self._scheduler, tokenizer, self._requests, self._totals, observer, self._head
        )
        self._loop = StepLoop(
            self._scheduler,
            runner,
            self._delivery,
            self._requests,
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
            max_prompt_tokens=max_total_tokens - (not self._pools),
            max_total_tokens=max_total_tokens,
            eos_token_ids=eos_token_ids,
            runner=runner.info,
        )
        self._task = asyncio.get_running_loop().create_task(self._loop.run())

    @property
    def healthy(self) -> bool:
        return self._loop.is_healthy

    async def open(self, request: GenerationRequest, stream: EventStream) -> None:
        """Check a request and queue it; its events go to ``stream``.

        Raises UserError, CapacityError when the queue is full, EngineError when not running.
        """
        arrival_s = time.monotonic()
        self._check_accepting()
        self._check_request(request)
        vocab_size = self._runner.info.vocab_size
        request = replace(request, params=request.params.counted(vocab_size))
        params = request.params
        self._check_queue(params.n)
        self._num_encoding += 1
        self._num_encoding_sequences += params.n
        try:
            prompt = await self._prompt(request)
            self._check_prompt(prompt.ids)
            self._check_num_tokens(len(prompt.ids), params.n)
            compiled = await self._compiled(params)
            stops = await stop_strings(params.stop)
        finally:
            self._num_encoding -= 1
            self._num_encoding_sequences -= params.n
        self._check_accepting()
        self._check_id(request.request_id)
        adapter = self.adapters.find(request.adapter)
        self._admit(request, prompt, compiled, stops, adapter, stream, arrival_s)
        stream.abort, stream.prompt_ids = partial(self.abort, request.request_id), prompt.ids

    def abort(self, request_id: str, stream: EventStream | None = None) -> None:
        """End a request; does nothing when it has ended, or when ``stream`` isn't its own."""
        request = self._requests.get(request_id)
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
        for request in list(self._requests.values()):
            self._delivery.abort(request)

    def _admit(
        self,
        request: GenerationRequest,
        prompt: WholeText,
        grammar: CompiledGrammar | None,
        stops: StopStrings | None,
        adapter: LoraSlot | None,
        stream: EventStream,
        arrival_s: float,
    ) -> None:
        seed = request.params.seed
        active = ActiveRequest(
            request,
            prompt.ids,
            adapter=adapter,
            seed=self._derived_seed() if seed is None else seed,
            arrival_s=arrival_s,
            stream=stream,
        )
        active.sequences = self._sequences(active, grammar, stops)
        if self._head is not None:
            active.sequences[0].row_sum = RowSum(self._head.spec.rows)
            if self._head.spec.tells_pairs_apart:
                active.sequences[0].num_first = prompt.num_first
        self._totals.num_requests += 1
        self._totals.num_prompt_tokens += len(prompt.ids)
        self._requests[request.request_id] = active
        hashes = [] if self._restore is None else self._memory.usable_hashes(active.sequences[0])
        is_restoring = self._restore is not None and self._restore.wanted(hashes) > 0
        self._scheduler.add(active, is_restoring=is_restoring)
        if is_restoring:
            task = asyncio.get_running_loop().create_task(self._bring_back(active, hashes))
            self._restoring.add(task)
            task.add_done_callback(self._restoring.discard)
        if request.echo and not active.is_scoring_prompt:
            self._delivery.put_prompt(active)
            stream.notify()
        self._loop.wake()

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

    def _sequences(
        self, active: ActiveRequest, grammar: CompiledGrammar | None, stops: StopStrings | None
    ) -> list[Sequence]:
        request = active.request
        params = request.params
        num_prompt = len(active.prompt_ids)
        max_len = self.info.max_total_tokens
        if self._head is not None:
            max_len = num_prompt
        elif params.max_new_tokens is not None:
            max_len = min(max_len, num_prompt + params.max_new_tokens)
        eos_ids = frozenset() if params.ignore_eos else self._eos_ids
        hashes = self._memory.hash_prompt(active.prompt_ids, active.prefix_seed)
        end_ids = eos_ids | frozenset(params.stop_token_ids)
        return [
            Sequence(
                active,
                choice,
                key=(request.priority, self._totals.num_requests, choice),
                max_len=max_len,
                end_ids=end_ids,
                hashes=hashes.copy(),
                detokenizer=self.tokenizer.detokenizer(
                    skip_special_tokens=params.skip_special_tokens,
                    kept=params.kept_special_tokens,
                    context=active.prompt_ids,
                ),
                stop_matcher=StopMatcher(stops, params.include_stop) if stops else None,
                has_eos=bool(eos_ids),
                matcher=None if grammar is None else grammar.matcher(),
            )
            for choice in range(params.n)
        ]

    async def _prompt(self, request: GenerationRequest) -> WholeText:
        if request.pooling is not None:
            return await self._pooled_prompt(request, request.pooling)
        if request.prompt_token_ids is not None:
            return WholeText(list(request.prompt_token_ids))
        assert request.prompt is not None
        ids = await self.tokenizer.encode(
            request.prompt,
            add_special_tokens=request.add_special_tokens,
            max_tokens=self.info.max_prompt_tokens,
        )
        return WholeText(ids)

    async def _pooled_prompt(self, request: GenerationRequest, params: PoolingParams) -> WholeText:
        assert self._head is not None
        limit = self.info.max_prompt_tokens
        ids = request.prompt_token_ids
        if ids is None:
            assert request.prompt is not None
            framed = framed_text(self._head.spec, request.prompt, params)
            return await self.tokenizer.encode_whole(framed, limit, params.truncate)
        if len(ids) > limit and params.truncate:
            ids = ids[-limit:] if params.truncate == "left" else ids[:limit]
        return WholeText(list(ids))

    async def _compiled(self, params: SamplingParams) -> CompiledGrammar | None:
        """What keeps the output to the grammar and the tokens that are asked for."""
        grammar, allowed = params.grammar, params.allowed_token_ids
        compiled = None if grammar is None else await self._grammars.compile(grammar)
        if allowed is None:
            return compiled
        return AllowedTokens(allowed, self._runner.info.vocab_size, compiled)

    def _check_accepting(self) -> None:
        if self.state is not LifeState.READY:
            raise EngineError(f"the engine is {self.state}, it takes no new requests")
        if not self.healthy:
            raise EngineError("the engine is unhealthy after failed steps; restart it")

    def _check_request(self, request: GenerationRequest) -> None:
        if (request.prompt is None) == (request.prompt_token_ids is None):
            raise UserError("give either prompt or prompt_token_ids", field="prompt")
        if not isinstance(request.prompt, str | None):
            raise UserError(
                f"prompt must be a text, got {type(request.prompt).__name__}", field="prompt"
            )
        for name, text in (("cache_salt", request.cache_salt), ("tenant", request.tenant)):
            if not isinstance(text, str):
                raise UserError(f"{name} must be a text, got {text!r:.80}", field=name)
        if not isinstance(request.adapter, str):
            raise UserError(f"adapter must be a text, got {request.adapter!r:.80}", field="adapter")
        self.adapters.find(request.adapter)
        self._check_task(request)
        if not isinstance(request.priority, int):
            raise UserError(f"priority must be an int, got {request.priority!r:.80}")
        info = self._runner.info
        request.params.validate(vocab_size=info.vocab_size, max_logprobs=info.max_logprobs)
        if request.params.prompt_logprobs is not None and not info.continues_prompts:
            raise UserError(
                "the model's encoder reads the prompt, whose tokens have no log-probabilities: "
                "leave them out",
                field="prompt_logprobs",
            )
        self._check_id(request.request_id)

    def _check_task(self, request: GenerationRequest) -> None:
        if request.pooling is not None and self._head is not None:
            request.pooling.check(self._head)
        elif self._head is not None:
            gives, route = "embeddings", "/v1/embeddings or /embed"
            if self._head.spec.task == "rerank":
                gives, route = "scores of pairs of texts", "/v1/rerank or /rerank"
            raise UserError(
                f"the model {self.info.model} gives {gives}, it doesn't generate text: use {route}",
                field="model",
            )
        elif request.pooling is not None:
            raise UserError(
                f"the model {self.info.model} generates text; it is served without embeddings and "
                "scores: serve it with option.task=text_embedding to have its embeddings",
                field="model",
            )

    def _check_id(self, request_id: str) -> None:
        if request_id in self._requests:
            raise UserError(f"request id {request_id!r} is in use", field="request_id")

    def _check_prompt(self, prompt_ids: list[int]) -> None:
        if not prompt_ids:
            raise UserError(
                "the prompt is empty: it must be provided and non-empty, of at least one token",
                field="prompt",
            )
        if len(prompt_ids) > self.info.max_prompt_tokens:
            room = self.info.max_total_tokens - self.info.max_prompt_tokens
            raise prompt_too_long(len(prompt_ids), self.info.max_prompt_tokens, room=room)
        self.check_token_ids(prompt_ids)

    def check_token_ids(self, token_ids: abc.Sequence[int]) -> None:
        """Raise UserError naming the first id that the model doesn't have."""
        vocab_size = self._runner.info.vocab_size
        try:
            if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
                return
        except TypeError:
            raise UserError(f"token ids are ints, not {token_ids!r:.80}", field="prompt") from None
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise UserError(
            f"token id {wrong} is out of vocabulary; allowed are 0 to {vocab_size - 1}",
            field="prompt",
        )

    def _check_queue(self, num_choices: int) -> None:
        """Each choice counts; a request with more of them than may wait comes in alone."""
        num_waiting = self._scheduler.num_waiting + self._num_encoding_sequences
        # Those for whom there is room don't wait for more than the next step.
        num_waiting -= self._memory.num_free_rows
        limit = self._config.max_queue_size
        if num_waiting < limit and (num_waiting <= 0 or num_waiting + num_choices <= limit):
            return
        raise CapacityError(
            f"{num_waiting} requests are waiting, at most {limit} may (job_queue_size; each of "
            "their choices counts); retry later, or raise the limit",
            retry_after_s=self._retry_after_s(num_waiting),
        )

    def _check_num_tokens(self, num_prompt_tokens: int, num_choices: int) -> None:
        num_tokens, limit = num_prompt_tokens * num_choices, _MAX_PROMPT_TOKENS
        if num_tokens > limit:
            raise UserError(
                f"n is {num_choices}, of a prompt of {num_prompt_tokens} tokens; together they may "
                f"have {limit}: lower n, or shorten the prompt",
                field="n",
            )
        if self._requests.num_prompt_tokens + num_tokens > limit:
            raise CapacityError(
                f"the open requests' prompts have {self._requests.num_prompt_tokens} tokens, and "
                f"with {num_tokens} more over {limit}; retry later",
                retry_after_s=self._retry_after_s(len(self._requests)),
            )

    def _num_waiting(self) -> int:
        return len(self._requests) - self._scheduler.num_running_requests + self._num_encoding

    def _retry_after_s(self, num_waiting: int) -> float:
        """When the queue will have moved, at the mean pace since the start."""
        num_finished = self._totals.num_finished_requests
        if not num_finished:
            return 1.0
        seconds_each = (time.monotonic() - self._started_s) / num_finished
        return min(max(1.0, seconds_each * num_waiting / 2), _MAX_RETRY_AFTER_S)

    def _derived_seed(self) -> int:
        """The seed of a request without one: a function of the engine's seed and its number."""
        data = f"{self._config.seed}/{self._totals.num_requests}".encode()
        digest = hashlib.blake2b(data, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


def _check_capacities(runner: Runner) -> None:
    info = runner.info
    for name, value in (
        ("max_num_batched_tokens", info.max_num_batched_tokens),
        ("max_logit_rows", info.max_logit_rows),
    ):
        if value < info.max_num_seqs:
            raise ConfigError(
                f"{name} is {value}, but must be at least max_num_seqs ({info.max_num_seqs}): "
                "raise it, or lower max_num_seqs",
                field=name,
            )
    if info.num_blocks * info.block_size < 2:
        raise ConfigError("the KV cache holds less than two tokens", field="kv_cache_bytes")
