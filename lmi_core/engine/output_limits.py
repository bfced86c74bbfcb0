"""What a request's texts are kept to: grammars and tokens, where they end, how long they are."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import numpy.typing as npt

from lmi_core._native import LogitBiases
from lmi_core.engine.handover import Handover
from lmi_core.engine.logits_processors import NO_PROCESSORS
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.sequence import ActiveRequest, Sequence
from lmi_core.engine.stats import EngineInfo
from lmi_core.errors import UserError
from lmi_core.structured.allowed_tokens import AllowedTokens
from lmi_core.structured.banned_sequences import BannedSequences, word_sequences
from lmi_core.structured.compiler import GrammarCompiler
from lmi_core.structured.forced_bounds import ForcedBounds
from lmi_core.structured.matcher import CompiledGrammar
from lmi_core.structured.thinking_budget import ThinkingLimit
from lmi_core.text.stop import StopMatcher, StopStrings
from lmi_core.text.tokenizer import Tokenizer


class Outputs:
    """Of the requests of one model."""

    def __init__(self, info: EngineInfo, tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._grammars = grammars

    async def compiled(
        self, params: SamplingParams, prompt_ids: list[int]
    ) -> CompiledGrammar | None:
        """What keeps the output to the grammar and the tokens that are asked for."""
        grammar, allowed = params.grammar, params.allowed_token_ids
        compiled = None if grammar is None else await self._grammars.compile(grammar)
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
        begin_id = self._begin_id(params, prompt_ids)
        before = self._info.runner.before_outputs(prompt_ids, processors.forced_bos_token_id)
        sequences = list(params.bad_words_ids)
        if params.bad_words:
            encode = partial(self._tokenizer.encode_now, add_special_tokens=False)
            sequences += await asyncio.to_thread(word_sequences, params.bad_words, encode)
        if not (ngram_size or prompt_ngram_size or sequences or banned_at):
            return grammar
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
