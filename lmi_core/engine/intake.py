"""Requests on their way into an engine: checked, their texts made token ids, and what the outputs
are kept to: grammars and tokens, where they end, how long they are."""

from __future__ import annotations

import asyncio
import collections.abc as abc
import hashlib
from dataclasses import fields, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from lmi_core._native import LogitBiases
from lmi_core.engine.handover import Handover
from lmi_core.engine.logits_processors import NO_PROCESSORS
from lmi_core.engine.param_checks import wrong_type
from lmi_core.engine.pooling_params import framed_text
from lmi_core.engine.request import BACKGROUND, GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.sequence import ActiveRequest, Sequence
from lmi_core.engine.stats import EngineInfo
from lmi_core.errors import CapacityError, TaskError, UserError
from lmi_core.models.pooling_head import PoolingHead
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.field_checks import check_fields
from lmi_core.structured.allowed_tokens import AllowedTokens
from lmi_core.structured.banned_sequences import BannedSequences, word_sequences
from lmi_core.structured.compiler import GrammarCompiler
from lmi_core.structured.forced_bounds import ForcedBounds
from lmi_core.structured.matcher import CompiledGrammar
from lmi_core.structured.thinking_budget import ThinkingLimit
from lmi_core.text.framed_text import WholeText
from lmi_core.text.prompt_errors import check_token_ids, empty_prompt, prompt_too_long
from lmi_core.text.stop import StopMatcher, StopStrings
from lmi_core.text.tokenizer import Tokenizer

_MAX_RETRY_AFTER_S = 60.0
_MAX_PROMPT_TOKENS = 1 << 24
"""Of all choices of all open requests together; they take 4 bytes each."""


class Intake:
    """Makes of requests what an engine runs, by what is known of a loaded model, wherever its steps
    run."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer,
        config: EngineConfig,
        check_adapter: abc.Callable[[str], object],
    ) -> None:
        """``check_adapter`` raises UserError for an adapter that isn't registered."""
        self._info = info
        self._tokenizer = tokenizer
        self._check_adapter = check_adapter
        self._head = info.head
        self._has_priorities = config.scheduling_policy == "priority"

    async def check(self, request: GenerationRequest) -> None:
        """UserError for what can't be served, the prompt's length aside."""
        if not isinstance(request, GenerationRequest):
            raise wrong_type("request", request, "the request must be a GenerationRequest")
        check_fields(request)
        request.params.check_types()
        if request.params.has_many_ids:
            await asyncio.to_thread(self._check, request)
        else:
            self._check(request)

    def _check(self, request: GenerationRequest) -> None:
        if (request.prompt is None) == (request.prompt_token_ids is None):
            raise UserError("give either prompt or prompt_token_ids", field="prompt")
        self._check_adapter(request.adapter)
        self._check_task(request)
        if not self._has_priorities and request.priority not in (0, BACKGROUND):
            raise UserError(
                f"priority is {request.priority}, but requests run in the order of arrival here "
                "(option.scheduling_policy=fcfs): leave it out",
                field="priority",
            )
        wait_s = request.max_queue_s
        if wait_s is not None and not wait_s >= 0:
            raise UserError(
                f"max_queue_s must be a number of seconds, got {wait_s!r:.80}", field="max_queue_s"
            )
        info = self._info.runner
        request.params.check_values(vocab_size=info.vocab_size, max_logprobs=info.max_logprobs)
        processors = request.params.processors
        if processors is not None and not info.has_scales_and_cutoffs:
            processors.check_plain()
        if request.params.prompt_logprobs is not None and not info.continues_prompts:
            raise UserError(
                "the model's encoder reads the prompt, whose tokens have no log-probabilities: "
                "leave them out",
                field="prompt_logprobs",
            )

    def check_token_ids(self, token_ids: abc.Sequence[int]) -> None:
        """Raise UserError naming the first id that the model doesn't have."""
        check_token_ids(token_ids, self._info.runner.vocab_size)

    def _check_task(self, request: GenerationRequest) -> None:
        if request.pooling is not None and self._head is not None:
            request.pooling.check(self._head)
            _check_pooled(request)
        elif self._head is not None:
            gives, route = "embeddings", "/v1/embeddings or /embed"
            if self._head.spec.task == "rerank":
                gives, route = "scores of pairs of texts", "/v1/rerank or /rerank"
            raise TaskError(
                f"the model {self._info.model!r} gives {gives}, it doesn't generate text: use "
                f"{route}",
                field="model",
            )
        elif request.pooling is not None:
            raise TaskError(
                f"the model {self._info.model!r} generates text; it is served without embeddings "
                "and scores: serve it with option.task=text_embedding to have its embeddings",
                field="model",
            )

    async def compiled(
        self, params: SamplingParams, prompt_ids: list[int], grammars: GrammarCompiler
    ) -> CompiledGrammar | None:
        """What keeps the output to the grammar and the tokens that are asked for."""
        grammar, allowed = params.grammar, params.allowed_token_ids
        compiled = None if grammar is None else await grammars.compile(grammar)
        if allowed is not None:
            compiled = AllowedTokens(allowed, self._info.runner.vocab_size, compiled)
        compiled = await self._banned(params, prompt_ids, compiled)
        if params.thinking is not None:
            end_ids = self._tokenizer.encode_now(params.thinking.end, add_special_tokens=False)
            bytes_of = self._tokenizer.bytes_of
            compiled = ThinkingLimit(params.thinking, end_ids, bytes_of, compiled)
        processors = params.processors or NO_PROCESSORS
        last_ids = processors.forced_end_ids(self._info.runner.forced_end_ids)
        begin_id = self._begin_id(params, prompt_ids)
        if not last_ids and begin_id is None:
            return compiled
        num_prompt = len(prompt_ids)
        max_tokens = self.max_len(params, num_prompt) - num_prompt
        return ForcedBounds(compiled, max_tokens=max_tokens, begin_id=begin_id, end_ids=last_ids)

    def _begin_id(self, params: SamplingParams, prompt_ids: list[int]) -> int | None:
        """The output's first token, where the request forces it and the runner doesn't."""
        runner, processors = self._info.runner, params.processors or NO_PROCESSORS
        begin_id = processors.forced_bos_token_id
        if begin_id is None or len(runner.before_outputs(prompt_ids)) > 1:
            return None
        if params.min_new_tokens and begin_id in self.end_ids(params):
            raise UserError(
                f"forced_bos_token_id is {begin_id}, which ends a text that min_new_tokens asks "
                "for: leave one of them out",
                field="forced_bos_token_id",
            )
        return begin_id

    async def _banned(
        self, params: SamplingParams, prompt_ids: list[int], grammar: CompiledGrammar | None
    ) -> CompiledGrammar | None:
        """``grammar`` without sequences of tokens that are banned behind the prompt, and what the
        output begins with anyway."""
        processors, ngram_size = params.processors or NO_PROCESSORS, params.no_repeat_ngram_size
        prompt_ngram_size = processors.encoder_no_repeat_ngram_size
        banned_at: dict[int, npt.NDArray[np.int32]] = {}
        if processors.begin_suppress_tokens:
            banned_at[0] = np.array(processors.begin_suppress_tokens, np.int32)
        sequences = list(params.bad_words_ids)
        if params.bad_words:
            encode = partial(self._tokenizer.encode_now, add_special_tokens=False)
            sequences += await asyncio.to_thread(word_sequences, params.bad_words, encode)
        if not (ngram_size or prompt_ngram_size or sequences or banned_at):
            return grammar
        begin_id = self._begin_id(params, prompt_ids)
        before = self._info.runner.before_outputs(prompt_ids, processors.forced_bos_token_id)
        return BannedSequences(
            before if begin_id is None else (*before, begin_id),
            source_ids=prompt_ids,
            ngram_size=ngram_size,
            prompt_ngram_size=prompt_ngram_size,
            sequences=sequences,
            banned_at=banned_at,
            grammar=grammar,
        )

    def max_len(self, params: SamplingParams, num_prompt: int) -> int:
        """Of a prompt and what may follow it."""
        most = self._info.max_total_tokens
        return (
            most if params.max_new_tokens is None else min(most, num_prompt + params.max_new_tokens)
        )

    def end_ids(self, params: SamplingParams) -> frozenset[int]:
        """Of tokens that end a text."""
        eos_ids = frozenset() if params.ignore_eos else frozenset(self._info.eos_token_ids)
        return eos_ids | frozenset(params.stop_token_ids)

    def sequences(
        self,
        active: ActiveRequest,
        grammar: CompiledGrammar | None,
        stops: StopStrings | None,
        handover: Handover,
    ) -> list[Sequence]:
        """The choices of a request, or the beams or candidates of its search."""
        request = active.request
        params = request.params
        num_prompt = len(active.prompt_ids)
        max_len = (
            num_prompt
            if self._info.runner.pooling is not None
            else self.max_len(params, num_prompt)
        )
        end_ids = self.end_ids(params)
        return [
            Sequence(
                active,
                choice,
                key=(request.priority, handover.order, choice),
                max_len=max_len,
                end_ids=end_ids,
                hashes=list(handover.hashes),
                detokenizer=self._tokenizer.detokenizer(
                    skip_special_tokens=params.skip_special_tokens,
                    kept=params.kept_special_tokens,
                    context=active.prompt_ids if self._info.runner.continues_prompts else (),
                ),
                stop_matcher=StopMatcher(stops, params.include_stop) if stops else None,
                has_eos=bool(self._info.eos_token_ids) and not params.ignore_eos,
                matcher=None if grammar is None else grammar.matcher(),
            )
            for choice in range(params.num_sequences)
        ]


def _check_pooled(request: GenerationRequest) -> None:
    """Raise UserError for what only generated texts have; a seed, which changes nothing, comes with
    every request that a copy is handed."""
    names = ["echo"] if request.echo else []
    params = replace(request.params, seed=None)
    for each in fields(SamplingParams) if params != SamplingParams() else ():
        if getattr(params, each.name) != each.default:
            names.append(each.name)
    if names:
        raise UserError(
            f"{names[0]} is for generated texts, not for embeddings and scores: leave it out",
            field=names[0],
        )


async def prompt_of(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    head: PoolingHead | None,
    *,
    max_tokens: int,
    vocab_size: int,
) -> WholeText:
    """Its token ids; UserError for too few, too many, or some that the model doesn't have.
    ``head``: of a model that pools."""
    prompt = await _token_ids(request, tokenizer, head, max_tokens)
    if not prompt.ids:
        raise empty_prompt()
    if len(prompt.ids) > max_tokens:
        raise prompt_too_long(len(prompt.ids), max_tokens, room=int(head is None))
    check_token_ids(prompt.ids, vocab_size)
    return prompt


async def _token_ids(
    request: GenerationRequest, tokenizer: Tokenizer, head: PoolingHead | None, limit: int
) -> WholeText:
    params = request.pooling
    if (ids := request.prompt_token_ids) is not None:
        if params is not None and params.truncate and len(ids) > limit:
            ids = ids[-limit:] if params.truncate == "left" else ids[:limit]
        return WholeText(list(ids))
    assert request.prompt is not None
    if params is not None:
        assert head is not None
        framed = framed_text(head.spec, request.prompt, params)
        return await tokenizer.encode_whole(framed, limit, params.truncate)
    special = request.add_special_tokens
    text = request.prompt
    return WholeText(await tokenizer.encode(text, add_special_tokens=special, max_tokens=limit))


async def logit_biases(params: SamplingParams) -> LogitBiases | None:
    """What is added to logits; None: nothing."""
    processors = params.processors or NO_PROCESSORS
    if not params.logit_bias and not processors.sequence_bias:
        return None

    def made() -> LogitBiases:
        # By iterators, since one call that converts all of them would hold the interpreter.
        count = len(params.logit_bias)
        ids = np.fromiter((token_id for token_id, _ in params.logit_bias), np.int32, count)
        biases = np.fromiter((bias for _, bias in params.logit_bias), np.float32, count)
        return LogitBiases(ids, biases, processors.sequence_bias)

    return await asyncio.to_thread(made) if params.has_many_ids else made()


def check_room(
    num_choices: int, num_waiting: int, limit: int, hint_s: abc.Callable[[int], float]
) -> None:
    """Raise CapacityError where too many choices wait. Each counts; a request with more of them
    than may wait comes in alone."""
    if num_waiting < limit and (num_waiting <= 0 or num_waiting + num_choices <= limit):
        return
    raise CapacityError(
        f"{num_waiting} requests are waiting, at most {limit} may (job_queue_size; each of "
        "their choices counts); retry later, or raise the limit",
        retry_after_s=hint_s(num_waiting),
    )


def waited_too_long(waited_s: float, most_s: float | None) -> CapacityError:
    """What a request ends with that nobody began in time."""
    return CapacityError(
        f"the request waited {waited_s:.3g} s for its turn, and may wait {most_s:g} "
        "(max_queue_s); retry later, or allow more",
        retry_after_s=1.0,
    )


def check_num_tokens(
    num_prompt_tokens: int,
    num_choices: int,
    num_open_tokens: int,
    hint_s: abc.Callable[[], float],
) -> None:
    """Raise UserError or CapacityError where prompts, once per choice, take too much memory;
    ``num_open_tokens``: those of the open requests."""
    num_tokens, limit = num_prompt_tokens * num_choices, _MAX_PROMPT_TOKENS
    if num_tokens > limit:
        raise UserError(
            f"n is {num_choices}, of a prompt of {num_prompt_tokens} tokens; together they may "
            f"have {limit}: lower n, or shorten the prompt",
            field="n",
        )
    if num_open_tokens + num_tokens > limit:
        raise CapacityError(
            f"the open requests' prompts have {num_open_tokens} tokens, and "
            f"with {num_tokens} more over {limit}; retry later",
            retry_after_s=hint_s(),
        )


def retry_after_s(num_waiting: int, num_finished: int, seconds: float) -> float:
    """When a queue will have moved, at the mean pace of ``seconds``."""
    if not num_finished:
        return 1.0
    return min(max(1.0, seconds / num_finished * num_waiting / 2), _MAX_RETRY_AFTER_S)


def derived_seed(base: int, num_requests: int) -> int:
    """The seed of a request without one: a function of the engine's seed and of the requests before
    it."""
    digest = hashlib.blake2b(f"{base}/{num_requests}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
