"""Why no token could be sampled behind a text: what a request bans, or a model's logits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.sequence import Sequence
from lmi_core.errors import EngineError


def why_nothing_is_left(sequence: Sequence, vocab_size: int) -> Exception:
    """A UserError naming the request's bans where they leave none of ``vocab_size`` tokens."""
    if sequence.error is not None:
        return sequence.error
    params = sequence.request.request.params
    try:
        has_any = _allowed(sequence, params, vocab_size).any()
    except Exception as error:  # what a grammar says of itself
        return error
    if has_any:
        return EngineError("no token could be sampled: the model's logits aren't finite")
    return params.too_many_bans(sequence.num_generated)


def _allowed(sequence: Sequence, params: SamplingParams, vocab_size: int) -> npt.NDArray[np.uint8]:
    """1 for what may come."""
    mask = np.full(-(-vocab_size // 32), np.iinfo(np.uint32).max, np.uint32)
    if sequence.matcher is not None:
        sequence.matcher.fill_mask(mask)
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
    allowed[list(params.banned_token_ids)] = 0
    settings = sequence.request.row_settings
    assert settings is not None  # it was sampled for
    if sequence.num_generated < settings["min_tokens"]:
        allowed[settings["min_tokens_banned_ids"]] = 0
    return allowed
