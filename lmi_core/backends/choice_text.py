"""The text of one choice, token by token."""

from __future__ import annotations

from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.shown_text import shown_text
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
        self.num_generated += 1
        text, reason, stop = shown_text(
            token_id, reason, self._params, self._detokenizer, self._matcher, is_end=True
        )
        self.is_finished = reason is not None
        return text, reason, stop
