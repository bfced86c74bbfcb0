"""What a token adds to the text of its choice, as ``TokenEvent.text`` promises it."""

from __future__ import annotations

from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.text.detokenizer import Detokenizer
from lmi_core.text.stop import StopMatcher


def shown_text(
    token_id: int,
    reason: FinishReason | None,
    params: SamplingParams,
    detokenizer: Detokenizer,
    matcher: StopMatcher | None,
    *,
    is_end: bool,
) -> tuple[str, FinishReason | None, str | int | None]:
    """The text, and how the choice ends, if it does, by which stop.

    ``is_end``: the token is one that ends sequences, so that one that ended this one is not shown.
    """
    stop: str | int | None = token_id if reason is FinishReason.STOP else None
    is_hidden = (reason is FinishReason.STOP and not params.include_stop) or (
        reason is FinishReason.EOS and params.skip_special_tokens and is_end
    )
    text = "" if is_hidden else detokenizer.push(token_id)
    if reason is not None:
        text += detokenizer.flush()
    if matcher is None:
        return text, reason, stop
    text = matcher.push(text)
    if matcher.matched:
        return text, FinishReason.STOP, matcher.matched
    return (text + matcher.flush() if reason else text), reason, stop
