"""The request schema of completions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.text.infill import InfillForm, infill_form
from lmi_server.dialects.best_of import check_num_sequences
from lmi_server.dialects.decode import decode_json
from lmi_server.dialects.openai.schema import (
    OpenAIBody,
    check_common,
    check_range,
    common_sampling_params,
)

Prompt = str | tuple[int, ...]

_DEFAULT_MAX_TOKENS = 16
_MAX_PROMPTS = 1024


class CompletionBody(OpenAIBody, frozen=True, kw_only=True):
    """A completion request; what isn't named here is ignored."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    @property
    def scores_only(self) -> bool:
        """``echo`` with ``max_tokens`` 0: the prompt alone comes back."""
        return bool(self.echo) and self.max_tokens == 0


_BODY = msgspec.json.Decoder(CompletionBody)


def decode_completion(body: bytes) -> CompletionBody:
    """Decode and check; UserError names the field at fault."""
    completion = decode_json(_BODY, body)
    check_common(completion)
    check_range("logprobs", completion.logprobs, -1, None)
    if completion.stream and completion.num_candidates > completion.num_choices:
        raise UserError(
            f"best_of is {completion.best_of} and n is {completion.num_choices}; the best are "
            "known when all have ended, so they can't be streamed: leave out best_of or stream",
            field="best_of",
        )
    if completion.max_tokens == 0 and not completion.echo:
        raise UserError("max_tokens must be at least 1, got 0 without echo", field="max_tokens")
    return completion


def prompts_of(completion: CompletionBody) -> tuple[Prompt, ...]:
    """One or several texts, or lists of token ids."""
    given = completion.prompt
    if isinstance(given, str):
        return (given,)
    if not given:
        raise UserError(
            "prompt must be provided and non-empty: send a string or a list of token ids",
            field="prompt",
        )
    if all(isinstance(item, int) for item in given):
        return (_token_ids(given, "prompt"),)
    if len(given) > _MAX_PROMPTS:
        raise UserError(
            f"prompt has {len(given)} prompts; at most {_MAX_PROMPTS} fit into one request",
            field="prompt",
        )
    prompts: list[Prompt] = []
    for index, item in enumerate(given):
        if isinstance(item, int):
            raise UserError(
                f"prompt[{index}] is a token id among prompts; put ids into lists of their own",
                field=f"prompt[{index}]",
            )
        prompts.append(item if isinstance(item, str) else _token_ids(item, f"prompt[{index}]"))
    check_num_sequences(len(prompts), completion.num_candidates, "prompt")
    return tuple(prompts)


def infill_of(backend: Any) -> InfillForm | None:
    """The form of prompts with a suffix that a backend's model was taught, if any."""
    return infill_form(backend.tokenizer.token_id)


def with_suffix(
    prompts: tuple[Prompt, ...], suffix: str | None, form: Callable[[], InfillForm | None]
) -> tuple[Prompt, ...]:
    """The prompts for a text that ``suffix`` comes after, in the model's own form."""
    if not suffix:
        return prompts
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise UserError("suffix needs the prompt as text, not token ids", field="suffix")
    infill = form()
    if infill is None:
        raise UserError(
            "suffix is for models that were taught to fill in text, and this model has no tokens "
            "for that; leave suffix out",
            field="suffix",
        )
    return tuple(infill.prompt(str(prompt), suffix) for prompt in prompts)


def completion_sampling_params(completion: CompletionBody) -> SamplingParams:
    max_tokens, logprobs = completion.max_tokens, completion.logprobs
    if logprobs is None and completion.num_candidates > completion.num_choices:
        logprobs = 0  # the best are known by it
    return common_sampling_params(
        completion,
        max_new_tokens=_DEFAULT_MAX_TOKENS if max_tokens is None else max(1, max_tokens),
        logprobs=logprobs,
        prompt_logprobs=completion.logprobs if completion.echo else None,
    )


def completion_requests(
    request_id: str,
    body: CompletionBody,
    prompts: tuple[Prompt, ...],
    params: SamplingParams,
    adapter: str = "",
) -> tuple[GenerationRequest, ...]:
    """One request per prompt."""
    return tuple(
        GenerationRequest(
            request_id=request_id if len(prompts) == 1 else f"{request_id}-{i}",
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else prompt,
            add_special_tokens=body.add_special_tokens is not False,
            params=params,
            priority=body.priority or 0,
            max_queue_s=body.max_queue_s,
            cache_salt=body.cache_salt or "",
            echo=(bool(body.echo) and params.prompt_logprobs is not None) or body.shows_prompt,
            adapter=adapter,
        )
        for i, prompt in enumerate(prompts)
    )


def _token_ids(items: list[str | int | list[int]] | list[int], where: str) -> tuple[int, ...]:
    ids = tuple(item for item in items if isinstance(item, int))
    if not ids:
        raise UserError(f"{where} is an empty list; send at least one token id", field=where)
    if any(token_id < 0 for token_id in ids):
        raise UserError(f"{where} has a negative token id", field=where)
    return ids
