"""Beam search: several texts of one prompt go on at once, and in each step only the likeliest of
all their continuations do.

Scores, the order of ties aside, and when a search ends are those of ``generate`` in Transformers 5:
the log-probabilities' sum, of texts that have ended divided by their length to the power of
``length_penalty``.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass
from typing import NamedTuple

from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.ranked_tokens import Ranked, RankedBans
from lmi_core.engine.sampling_params import SamplingParams


class Move(NamedTuple):
    """What a beam becomes: the text of beam ``parent`` and a token."""

    parent: int
    token_id: int
    logprob: float
    score: float
    """Of the whole text."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A text that has ended."""

    token_ids: list[int]
    logprobs: list[float]
    score: float
    reason: FinishReason


class BeamSearch:
    """One request's search. It knows nothing of memory: beams are numbers, from 0 on."""

    def __init__(
        self,
        params: SamplingParams,
        end_ids: frozenset[int],
        *,
        max_tokens: int,
        bans: RankedBans,
    ) -> None:
        """``max_tokens``: of a text, without the prompt; ``bans``: what no text has."""
        self.num_sequences = self._num_beams = params.num_beams
        self.num_ranked = bans.num_ranked
        """Tokens behind each beam that ``note`` wants."""
        self.num_live = 1
        """Beams that go on; the prompt is one."""
        self.results: list[Hypothesis] | None = None
        """Once it has ended: the best ones, the best first."""
        self._params = params
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self._bans = bans
        self._tokens: list[list[int]] = [[]]
        self._logprobs: list[list[float]] = [[]]
        self._scores = [0.0]
        self._noted: dict[int, Ranked] = {}
        self._ended: list[Hypothesis] = []

    def note(self, beam: int, ranked: Ranked) -> bool:
        """The most likely tokens behind a beam; whether all beams' are there."""
        self._noted[beam] = ranked
        return len(self._noted) == self.num_live

    def forget(self, token_ids: MutableSequence[int]) -> None:
        """Beams are computed again, and noted again then; ``token_ids``, the first one's, stay."""
        self._noted.clear()

    def moves(self) -> list[Move]:
        """How the beams go on, best first; empty when the search has ended, see ``results``."""
        length = len(self._tokens[0]) + 1
        num_kept = self._num_beams * max(2, 1 + len(self._end_ids))
        candidates = sorted(self._candidates(), key=lambda move: -move.score)[:num_kept]
        self._noted.clear()
        moves: list[Move] = []
        for rank, move in enumerate(candidates):
            is_end = move.token_id in self._end_ids
            if not is_end and length < self._max_tokens:
                moves.append(move)
            elif rank < self._num_beams:
                self._end(move, is_end)
        self._ended.sort(key=lambda hypothesis: -hypothesis.score)
        del self._ended[self._num_beams :]
        if moves and self._may_improve(moves[0].score, length):
            return moves[: self._num_beams]
        self.results = self._ended[: self._params.n]
        return []

    def follow(self, moves: list[Move]) -> None:
        """The beams are what the moves made of them."""
        self._tokens = [[*self._tokens[m.parent], m.token_id] for m in moves]
        self._logprobs = [[*self._logprobs[m.parent], m.logprob] for m in moves]
        self._scores = [move.score for move in moves]
        self.num_live = len(moves)

    def _candidates(self) -> Iterable[Move]:
        for beam, ranked in sorted(self._noted.items()):
            for token_id, logprob in self._bans.allowed(ranked, self._tokens[beam]):
                yield Move(beam, token_id, logprob, self._scores[beam] + logprob)

    def _end(self, move: Move, is_end: bool) -> None:
        reason = FinishReason.LENGTH
        if is_end:
            is_stop_id = move.token_id in self._params.stop_token_ids
            reason = FinishReason.STOP if is_stop_id else FinishReason.EOS
        tokens = [*self._tokens[move.parent], move.token_id]
        logprobs = [*self._logprobs[move.parent], move.logprob]
        score = move.score / len(tokens) ** self._params.length_penalty
        self._ended.append(Hypothesis(tokens, logprobs, score, reason))

    def _may_improve(self, best: float, length: int) -> bool:
        """Whether what has ended could be beaten by a beam, of which the best has this score."""
        if len(self._ended) < self._num_beams:
            return True
        stopping, penalty = self._params.early_stopping, self._params.length_penalty
        if stopping is True:
            return False
        reached = self._max_tokens if stopping == "never" and penalty > 0 else length
        return bool(best / reached**penalty > self._ended[-1].score)
