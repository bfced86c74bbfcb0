"""A request from what a program gives: prompt, sampling parameters, or fields by their names."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, replace
from typing import Any

from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError

Prompt = str | Sequence[int]

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))
_REQUEST = frozenset(field.name for field in fields(GenerationRequest))
_OPTIONS = (_SAMPLING | _REQUEST) - {"params", "prompt", "prompt_token_ids"}


def make_request(
    prompt: Prompt | GenerationRequest,
    params: SamplingParams | None,
    options: Mapping[str, Any],
    request_id: str,
) -> GenerationRequest:
    """``options`` are fields of SamplingParams, which they change, and of GenerationRequest.

    Raises UserError for a name that is neither's, and for a whole request beside anything else.
    """
    if isinstance(prompt, GenerationRequest):
        if params is not None or options:
            raise UserError("a GenerationRequest already holds params and options")
        ids = prompt.prompt_token_ids
        if ids is None or isinstance(ids, tuple):
            return prompt
        return replace(prompt, prompt_token_ids=_token_ids(ids))
    if params is not None and not isinstance(params, SamplingParams):
        raise UserError(
            f"params must be SamplingParams, got {type(params).__name__}", field="params"
        )
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise UserError(
            f"there is no option {unknown[0]}; allowed are {', '.join(sorted(_OPTIONS))}",
            field=unknown[0],
        )
    sampling = {name: value for name, value in options.items() if name in _SAMPLING}
    others = {name: value for name, value in options.items() if name not in _SAMPLING}
    text = isinstance(prompt, str)
    return GenerationRequest(
        **{"request_id": request_id, **others},
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=None if text else _token_ids(prompt),
        params=replace(params or SamplingParams(), **sampling),
    )


def _token_ids(prompt: Sequence[Any]) -> tuple[int, ...]:
    """A prompt's ids as plain ints: numpy's are as good. Text as bytes is none, nor what has no
    order or more than ids."""
    try:
        if isinstance(prompt, bytes | bytearray | Set | Mapping):
            raise TypeError
        return tuple(operator.index(token_id) for token_id in prompt)
    except TypeError:
        raise UserError(
            "the prompt must be a text or a sequence of token ids, got "
            f"{type(prompt).__name__} {prompt!r:.80}",
            field="prompt",
        ) from None
