"""Beam search: several texts of one prompt go on at once, and in each step only the likeliest of
all their continuations do.

Scores, the order of ties aside, and when a search ends are those of ``generate`` in Transformers 5:
the log-probabilities' sum, of texts that have ended divided by their length to the power of
``length_penalty``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.runners.runner import RunnerInfo
from lmi_core.structured.banned_sequences import BannedSequences

Ranked = list[tuple[int, float]]
"""The most likely tokens and their log-probabilities, the likeliest first."""


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
        vocab_size: int,
        max_ranked: int,
        bans: BannedSequences | None = None,
    ) -> None:
        """``max_tokens``: of a text, without the prompt; ``max_ranked``: the most tokens that can
        be ranked behind a beam; ``bans``: what no text has. Raises UserError for more beams than
        they are enough for."""
        self.num_beams = params.num_beams
        self.num_live = 1
        """Beams that go on; the prompt is one."""
        self.results: list[Hypothesis] | None = None
        """Once it has ended: the best ones, the best first."""
        self._params = params
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self._bans = bans
        self._banned_ids = frozenset(params.banned_token_ids)
        self._tokens: list[list[int]] = [[]]
        self._logprobs: list[list[float]] = [[]]
        self._scores = [0.0]
        self._noted: dict[int, Ranked] = {}
        self._ended: list[Hypothesis] = []
        self._num_needed = min(vocab_size, self.num_beams + len(end_ids))
        """Tokens of each beam that may matter: any end, and others for all beams."""
        if self._num_needed > max_ranked:
            raise UserError(
                f"num_beams is {self.num_beams}: {self._num_needed} tokens of each beam have to be "
                f"compared, and option.max_logprobs is {max_ranked}; lower num_beams, or raise it",
                field="num_beams",
            )
        has_bans = bans is not None or params.banned_token_ids or params.min_new_tokens
        self.num_ranked = min(vocab_size, max_ranked) if has_bans else self._num_needed
        """Tokens behind each beam that ``note`` wants."""
        self._ranks_all = self.num_ranked == vocab_size

    def note(self, beam: int, ranked: Ranked) -> bool:
        """The most likely tokens behind a beam; whether all beams' are there."""
        self._noted[beam] = ranked
        return len(self._noted) == self.num_live

    def forget(self) -> None:
        """Beams are computed again, and noted again then."""
        self._noted.clear()

    def moves(self) -> list[Move]:
        """How the beams go on, best first; empty when the search has ended, see ``results``."""
        length = len(self._tokens[0]) + 1
        num_kept = self.num_beams * max(2, 1 + len(self._end_ids))
        candidates = sorted(self._candidates(), key=lambda move: -move.score)[:num_kept]
        self._noted.clear()
        moves: list[Move] = []
        for rank, move in enumerate(candidates):
            is_end = move.token_id in self._end_ids
            if not is_end and length < self._max_tokens:
                moves.append(move)
            elif rank < self.num_beams:
                self._end(move, is_end)
        self._ended.sort(key=lambda hypothesis: -hypothesis.score)
        del self._ended[self.num_beams :]
        if moves and self._may_improve(moves[0].score, length):
            return moves[: self.num_beams]
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
            banned = self._banned(beam)
            allowed = [(i, p) for i, p in ranked if i not in banned and p > -math.inf]
            if banned and len(allowed) < self._num_needed and not self._ranks_all:
                self._refuse_bans(len(allowed))
            for token_id, logprob in allowed:
                yield Move(beam, token_id, logprob, self._scores[beam] + logprob)

    def _banned(self, beam: int) -> frozenset[int]:
        banned = self._banned_ids
        if len(self._tokens[beam]) < self._params.min_new_tokens:
            banned |= self._end_ids
        if self._bans is not None:
            banned |= frozenset(self._bans.banned_after(self._tokens[beam]).tolist())
        return banned

    def _refuse_bans(self, num_allowed: int) -> None:
        """What isn't ranked may be better than what is left of what is."""
        raise UserError(
            f"num_beams is {self.num_beams}: of a beam's {self.num_ranked} likeliest tokens bans "
            f"leave {num_allowed}, but {self._num_needed} are compared; ban less, lower num_beams, "
            "or raise option.max_logprobs",
            field="num_beams",
        )

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
        if len(self._ended) < self.num_beams:
            return True
        stopping, penalty = self._params.early_stopping, self._params.length_penalty
        if stopping is True:
            return False
        reached = self._max_tokens if stopping == "never" and penalty > 0 else length
        return bool(best / reached**penalty > self._ended[-1].score)


def beam_search_of(
    params: SamplingParams,
    end_ids: frozenset[int],
    info: RunnerInfo,
    *,
    num_prompt: int,
    max_len: int,
    bans: BannedSequences | None,
) -> BeamSearch | None:
    """A request's search, if it wants one. ``max_len``: of the prompt and a text. Raises UserError
    for more beams than there are rows and blocks, of which it may need its own for each."""
    num_beams = params.num_beams
    if num_beams == 1:
        return None
    num_blocks = num_beams * -(-max_len // info.block_size)
    reason = ""
    if not info.shares_blocks:
        reason = "sequences of this model share no blocks of the cache, as beams do"
    elif num_beams > info.max_num_seqs:
        reason = f"option.max_rolling_batch_size allows {info.max_num_seqs} sequences in a step"
    elif num_blocks > info.num_blocks:
        reason = (
            f"beams of {max_len} tokens take {num_blocks} blocks of the cache, which has "
            f"{info.num_blocks}: ask for fewer tokens (max_new_tokens)"
        )
    if reason:
        raise UserError(
            f"num_beams is {num_beams}, but {reason}; lower num_beams", field="num_beams"
        )
    return BeamSearch(
        params,
        end_ids,
        max_tokens=max_len - num_prompt,
        vocab_size=info.vocab_size,
        max_ranked=info.max_logprobs,
        bans=bans,
    )
