"""What goes with a request from process to process: what was prepared, and its output so far."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lmi_core.engine.beam_search import BeamSearch
from lmi_core.engine.sequence import ActiveRequest, SequenceState
from lmi_core.engine.shown_text import shown_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Beside a request with token ids and a seed, all that any engine of the same model and
    configuration needs to go on with it by the same bits."""

    order: int
    """Requests run in this order within a priority."""
    arrival_s: float
    """By ``time.monotonic``, which processes of a machine share."""
    prefix_seed: bytes = b""
    """What its blocks' hashes start from."""
    hashes: tuple[bytes, ...] = ()
    """Of the prompt's full blocks; empty when prefixes aren't cached."""
    num_first: int = -1
    """As in ``WholeText``."""
    outputs: tuple[tuple[int, ...], ...] = ()
    """The tokens of each choice that were handed out; empty: none were."""
    finished: frozenset[int] = frozenset()
    """Choices whose last event was handed out."""
    had_prompt: bool = False
    """Whether the prompt's event was handed out."""
    num_cached_tokens: int | None = None
    queue_seconds: float = 0.0
    """What was said of the first admission; None: nothing yet."""
    last_token_s: float = 0.0
    """When the last token was handed out, or about then."""

    def by_clock(self, ahead_s: float, now_s: float) -> Handover:
        """As a machine tells it whose clock is ahead of the sender's, by about so much."""
        if not ahead_s:
            return self
        last_token_s = self.last_token_s and min(self.last_token_s + ahead_s, now_s)
        arrival_s = min(self.arrival_s + ahead_s, now_s)
        return replace(self, arrival_s=arrival_s, last_token_s=last_token_s)

    @property
    def is_resumed(self) -> bool:
        """Whether another engine has begun it."""
        return bool(self.outputs) or self.had_prompt


def resume(active: ActiveRequest, handover: Handover) -> None:
    """Take a new request to where it was."""
    active.num_cached_tokens = handover.num_cached_tokens
    active.queue_seconds = handover.queue_seconds
    if handover.had_prompt:
        active.is_scoring_prompt = False
    # Beams' texts are known once their search has ended: it begins anew.
    if isinstance(active.search, BeamSearch):
        active.num_given = [len(token_ids) for token_ids in handover.outputs]
        return
    params = active.request.params
    for sequence, token_ids in zip(active.sequences, handover.outputs, strict=False):
        sequence.token_ids.extend(token_ids)
        if sequence.choice in handover.finished:
            sequence.state = SequenceState.FINISHED
            sequence.is_delivered = True
            active.num_open -= 1
            continue
        sequence.last_token_s = handover.last_token_s if token_ids else 0.0
        detokenizer, stops = sequence.detokenizer, sequence.stop_matcher
        for token_id in token_ids:
            shown_text(token_id, None, params, detokenizer, stops, is_end=False)
            if sequence.matcher is not None:
                sequence.matcher.accept(token_id)
