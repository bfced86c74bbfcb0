"""The text of one choice, token by token."""

from __future__ import annotations

from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.text.detokenizer import Detokenizer
from lmi_core.text.stop import StopMatcher, StopStrings


class ChoiceText:
    """Turns ids into what may be shown, as ``TokenEvent.text`` promises it."""

    def __init__(
        self, params: SamplingParams, detokenizer: Detokenizer, stops: StopStrings | None
    ) -> None:
        self._params = params
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops, params.include_stop) if stops else None
        self.num_generated = 0
        self.is_finished = False

    def push(
        self, token_id: int, reason: FinishReason | None
    ) -> tuple[str, FinishReason | None, str | int | None]:
        """What a token adds, and how the choice ends, if it does, by which stop."""
        params = self._params
        self.num_generated += 1
        stop: str | int | None = token_id if reason is FinishReason.STOP else None
        is_hidden = (reason is FinishReason.STOP and not params.include_stop) or (
            reason is FinishReason.EOS and params.skip_special_tokens
        )
        text = "" if is_hidden else self._detokenizer.push(token_id)
        if reason is not None:
            text += self._detokenizer.flush()
        if self._matcher is not None:
            text = self._matcher.push(text)
            if self._matcher.matched:
                reason, stop = FinishReason.STOP, self._matcher.matched
            elif reason is not None:
                text += self._matcher.flush()
        self.is_finished = reason is not None
        return text, reason, stop
