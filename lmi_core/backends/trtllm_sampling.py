"""A request's parameters by the names of TensorRT-LLM's ``SamplingParams``.

Names and meanings are those of release 1.3. Stop texts are looked for here, in our detokenizer's
text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lmi_core.backends.library_grammar import grammar_arguments
from lmi_core.backends.token_source import refuse_typical_p
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar

_NO_END = -1
_MAX_SEED = 2**63 - 1


def sampling_arguments(
    params: SamplingParams, seed: int, eos_token_ids: Sequence[int], num_prompt_tokens: int
) -> dict[str, Any]:
    """All but the grammar and the biases, which need types of other libraries.

    Raises UserError for what the library would do otherwise than asked.
    """
    if params.allowed_token_ids is not None:
        raise UserError(
            "allowed_token_ids are not available with TensorRT-LLM; leave them out",
            field="allowed_token_ids",
        )
    return {
        "n": params.n,
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "bad_token_ids": list(params.banned_token_ids) or None,
        "detokenize": False,
        **_ends(params, eos_token_ids),
        **_choice(params, seed),
        **_penalties(params, num_prompt_tokens),
    }


def _ends(params: SamplingParams, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Where to stop. The library knows one end-of-sequence id; others are stop ids there.

    Its own ``ignore_eos`` would drop the stop ids, too.
    """
    ends = () if params.ignore_eos else tuple(eos_token_ids)
    stops = dict.fromkeys((*params.stop_token_ids, *ends[1:]))
    if params.min_new_tokens and stops:
        raise UserError(
            f"min_new_tokens={params.min_new_tokens}: TensorRT-LLM holds back one end-of-sequence "
            f"id only, and this request ends at {len(stops)} more; leave min_new_tokens out",
            field="min_new_tokens",
        )
    return {
        "end_id": ends[0] if ends else _NO_END,
        "pad_id": eos_token_ids[0] if eos_token_ids else 0,
        "stop_token_ids": list(stops) or None,
        "include_stop_str_in_output": True,  # the others would lose the stop id
        "min_tokens": params.min_new_tokens or None,
    }


def _choice(params: SamplingParams, seed: int) -> dict[str, Any]:
    if params.temperature == 0:
        if params.n > 1:
            raise UserError(
                f"n={params.n}: TensorRT-LLM gives one choice at temperature 0, where all are the "
                "same; ask for one, or for a temperature above 0",
                field="n",
            )
        return {}
    refuse_typical_p(params, "TensorRT-LLM")
    return {
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p or None,
        "seed": seed & _MAX_SEED,  # a signed number there
    }


def _penalties(params: SamplingParams, num_prompt_tokens: int) -> dict[str, Any]:
    penalties: dict[str, Any] = {}
    if params.repetition_penalty != 1:
        penalties["repetition_penalty"] = params.repetition_penalty
    if params.presence_penalty or params.frequency_penalty:
        penalties["presence_penalty"] = params.presence_penalty
        penalties["frequency_penalty"] = params.frequency_penalty
        penalties["prompt_ignore_length"] = num_prompt_tokens  # these two are over the output
    return penalties


def guided_decoding(grammar: Grammar) -> dict[str, Any]:
    """A grammar by the names of ``GuidedDecodingParams``; UserError for one that it can't read."""
    return grammar_arguments(grammar, "TensorRT-LLM", _one_of)


def _one_of(texts: list[str]) -> dict[str, Any]:
    quoted = (json.dumps(text, ensure_ascii=False) for text in texts)
    return {"grammar": "root ::= " + " | ".join(quoted)}


def request_priority(priority: int) -> float:
    """Ours, where lower runs first and 0 is usual, in the library's range: higher of 0 to 1."""
    return 0.5 - priority / (2 * (1 + abs(priority)))
