"""What the fake model must generate for a request on its own, without engine, cache or batch."""

from __future__ import annotations

from collections.abc import Sequence

from lmi_core.engine.sampling_params import SamplingParams
from tests.engine.fake_runner import SamplingRow, next_token


def expected_tokens(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    choice: int = 0,
    eos_ids: Sequence[int] = (),
    max_total_tokens: int = 256,
) -> list[int]:
    """The output ids of one choice, its end token included."""
    end_ids = {*params.stop_token_ids, *([] if params.ignore_eos else eos_ids)}
    observes = (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.min_new_tokens > 0
    )
    row = SamplingRow(
        temperature=params.temperature,
        seed=params.seed if params.seed is not None else seed,
        choice=choice,
        banned_ids=params.banned_token_ids,
        min_tokens=params.min_new_tokens,
        min_tokens_banned_ids=end_ids,
    )
    if params.repetition_penalty != 1.0:
        row.prompt_counts.update(prompt)
    tokens = list(prompt)
    limit = max_total_tokens
    if params.max_new_tokens is not None:
        limit = min(limit, len(prompt) + params.max_new_tokens)
    while len(tokens) < limit:
        token = next_token(tokens, len(tokens), row)
        tokens.append(token)
        if token in end_ids:
            break
        if observes:
            row.output_counts[token] += 1
    return tokens[len(prompt) :]
