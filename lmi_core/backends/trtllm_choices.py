"""The choices of one TensorRT-LLM request, as its results grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmi_core.backends.token_source import SampledToken, ScoredToken, TokenBatch, most_likely
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError


class TrtllmChoices:
    """Takes from the library's results, which hold everything so far, what is new.

    With several choices a result is about one of them, and the library names no reason for a choice
    before the last one ends: how a choice ended is seen from its tokens.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Sequence[int], prompt_ids: Sequence[int]
    ) -> None:
        self._params = params
        self._eos_token_ids = eos_token_ids
        self._prompt_ids = prompt_ids
        self._num_taken = [0] * params.n
        self._is_finished = [False] * params.n
        self._is_prompt_scored = params.prompt_logprobs is None

    def take(self, result: Any) -> TokenBatch:
        """What ``result`` holds beyond those before; EngineError for an end that isn't one."""
        batch = TokenBatch(num_cached_tokens=result.cached_tokens or 0)
        if not self._is_prompt_scored:
            self._is_prompt_scored = True
            batch.prompt = self._scored(result.outputs[0].prompt_logprobs or ())
        for choice in result.outputs:
            if not self._is_finished[choice.index]:
                batch.tokens += self._new_tokens(choice)
        return batch

    def _new_tokens(self, choice: Any) -> list[SampledToken]:
        index, tokens = choice.index, []
        for i in range(self._num_taken[index], len(choice.token_ids)):
            token_id = choice.token_ids[i]
            found = choice.logprobs[i] if self._params.logprobs is not None else None
            token = SampledToken(
                index,
                token_id,
                None if found is None else found[token_id].logprob,
                () if found is None else most_likely(found, self._params.logprobs or 0),
                self._reason(token_id, i + 1),
            )
            tokens.append(token)
            self._is_finished[index] |= token.finish_reason is not None
        self._num_taken[index] = len(choice.token_ids)
        if choice.finish_reason is not None and not self._is_finished[index]:
            tokens.append(self._left_out(choice))
            self._is_finished[index] = True
        return tokens

    def _reason(self, token_id: int, num_generated: int) -> FinishReason | None:
        params = self._params
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
        if not params.ignore_eos and token_id in self._eos_token_ids:
            return FinishReason.EOS
        return FinishReason.LENGTH if num_generated == params.max_new_tokens else None

    def _left_out(self, choice: Any) -> SampledToken:
        """The end-of-sequence id, for a choice that stopped without it."""
        if choice.finish_reason != "stop" or self._params.ignore_eos or not self._eos_token_ids:
            raise EngineError(
                f"TensorRT-LLM ended a request after {len(choice.token_ids)} tokens: "
                f"{choice.finish_reason}"
            )
        return SampledToken(choice.index, self._eos_token_ids[0], finish_reason=FinishReason.EOS)

    def _scored(self, found: Sequence[Any]) -> tuple[ScoredToken, ...]:
        """The prompt's tokens; the library's entry for each position is about the next one."""
        first, *others = self._prompt_ids
        if len(found) < len(others):
            raise EngineError(
                f"TensorRT-LLM scored {len(found)} of the prompt's {len(others)} tokens after the "
                "first; option.enable_kv_cache_reuse=false computes all of them"
            )
        num_top = self._params.prompt_logprobs or 0
        return (
            ScoredToken(first, None),
            *(
                ScoredToken.of(token_id, scores, num_top)
                for token_id, scores in zip(others, found, strict=False)
            ),
        )
