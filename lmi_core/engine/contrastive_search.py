"""Contrastive search: of a text's likeliest continuations, the one least like what was before.

Su et al., "A Contrastive Framework for Neural Text Generation", 2022: the token v among the k
likeliest that has the most (1 - alpha) p(v) - alpha max_j cos(h(v), h(x_j)), where h(v) is its own
hidden state behind the text, and h(x_j) are those of the text. Which hidden states are compared,
the runner decides. p is the model's own distribution; banned tokens are no candidates.
"""

from __future__ import annotations

import math
from collections.abc import MutableSequence
from typing import NamedTuple

import numpy as np

from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.ranked_tokens import Ranked, RankedBans
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.weights.formats import FloatArray

_ROWS_AT_ONCE = 256
"""Products have one shape whatever the text's length, so that a row's bits don't depend on it."""


class Chosen(NamedTuple):
    """A token of the text."""

    candidate: int
    token_id: int
    logprob: float
    top: Ranked
    """The likeliest tokens at its place."""
    finish_reason: FinishReason | None


class HiddenStates:
    """Directions of a text's hidden states, fp32, in chunks."""

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._chunks: list[FloatArray] = []
        self.num_rows = 0

    def add(self, rows: FloatArray) -> None:
        """``rows``: fp32 [tokens, columns]."""
        rows = _directions(rows)
        while len(rows):
            used = self.num_rows % _ROWS_AT_ONCE
            if not used:
                self._chunks.append(np.zeros((_ROWS_AT_ONCE, self._num_columns), np.float32))
            part = rows[: _ROWS_AT_ONCE - used]
            self._chunks[-1][used : used + len(part)] = part
            self.num_rows += len(part)
            rows = rows[len(part) :]

    def closest(self, rows: FloatArray) -> FloatArray:
        """The largest cosine between each of ``rows``, [candidates, columns], and any state."""
        directions = np.ascontiguousarray(_directions(rows).T)
        best = np.full(len(rows), -1.0, np.float32)
        for i, chunk in enumerate(self._chunks):
            num_used = min(_ROWS_AT_ONCE, self.num_rows - i * _ROWS_AT_ONCE)
            np.maximum(best, (chunk @ directions)[:num_used].max(axis=0), out=best)
        return best

    def clear(self) -> None:
        self._chunks.clear()
        self.num_rows = 0

    @staticmethod
    def num_bytes(num_tokens: int, num_columns: int) -> int:
        """Of a text's states."""
        return -(-num_tokens // _ROWS_AT_ONCE) * _ROWS_AT_ONCE * num_columns * 4


class ContrastiveSearch:
    """One request's search. It knows nothing of memory: candidates are numbers, from 0 on, of
    sequences that have the text and one token more; until there are some, sequence 0 has the text
    alone."""

    def __init__(
        self,
        params: SamplingParams,
        end_ids: frozenset[int],
        *,
        max_tokens: int,
        num_columns: int,
        num_state_blocks: int,
        bans: RankedBans,
    ) -> None:
        """``max_tokens``: of the text, without the prompt; ``num_columns``: of a hidden state;
        ``num_state_blocks``: what all of them take, counted in blocks of the KV cache."""
        assert params.penalty_alpha is not None
        self.num_sequences = params.top_k
        self.num_state_blocks = num_state_blocks
        self.num_ranked = max(bans.num_ranked, params.logprobs or 0)
        self._alpha = params.penalty_alpha
        self._params = params
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self._bans = bans
        self._states = HiddenStates(num_columns)
        self._candidates: Ranked = []
        self._top: Ranked = []
        self._noted: dict[int, tuple[FloatArray, Ranked]] = {}

    @property
    def num_live(self) -> int:
        """Sequences that it has now."""
        return max(1, len(self._candidates))

    @property
    def has_candidates(self) -> bool:
        return bool(self._candidates)

    def add_context(self, states: FloatArray) -> None:
        """The hidden states of the text's next tokens, [tokens, columns]."""
        self._states.add(states)

    def candidates(self, ranked: Ranked, generated: list[int]) -> Ranked:
        """Those behind the text, whose output so far is ``generated``: token ids and their
        log-probabilities. UserError where bans leave too few."""
        candidates = self._bans.allowed(ranked, generated)[: self.num_sequences]
        if not candidates:
            raise self._params.too_many_bans(len(generated))
        return candidates

    def follow(self, candidates: Ranked, ranked: Ranked) -> None:
        """The sequences are the candidates, of what is ``ranked`` behind the text."""
        self._candidates, self._top = candidates, ranked

    def note(self, candidate: int, state: FloatArray, ranked: Ranked) -> bool:
        """A candidate's hidden state, [columns], and the likeliest tokens behind it; whether all
        candidates' are there."""
        self._noted[candidate] = state, ranked
        return len(self._noted) == len(self._candidates)

    def choose(self, num_generated: int) -> Chosen:
        """The next token, behind ``num_generated`` of them; see ``ranked_behind``."""
        states = np.stack([self._noted[i][0] for i in range(len(self._candidates))])
        closest = self._states.closest(states).tolist()
        alpha = self._alpha
        scores = [
            (1 - alpha) * math.exp(logprob) - alpha * cosine
            for (_, logprob), cosine in zip(self._candidates, closest, strict=True)
        ]
        best = scores.index(max(scores))
        token_id, logprob = self._candidates[best]
        self._states.add(states[best : best + 1])
        reason = None
        if token_id in self._end_ids:
            is_stop_id = token_id in self._params.stop_token_ids
            reason = FinishReason.STOP if is_stop_id else FinishReason.EOS
        elif num_generated + 1 >= self._max_tokens:
            reason = FinishReason.LENGTH
        return Chosen(best, token_id, logprob, self._top, reason)

    def ranked_behind(self, candidate: int) -> Ranked:
        """The likeliest tokens behind the one that was chosen; the others are forgotten."""
        ranked = self._noted[candidate][1]
        self._noted.clear()
        return ranked

    def forget(self, token_ids: MutableSequence[int]) -> None:
        """Everything is computed again, and noted again then; ``token_ids``, sequence 0's, become
        the text."""
        if self._candidates:
            del token_ids[self._states.num_rows :]
        self._candidates = []
        self._noted.clear()
        self._states.clear()


def _directions(rows: FloatArray) -> FloatArray:
    lengths: FloatArray = np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    return np.divide(rows, np.maximum(lengths, np.float32(1e-30)), dtype=np.float32)
