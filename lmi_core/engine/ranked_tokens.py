"""The likeliest tokens behind a text, and those of them that it may go on with."""

from __future__ import annotations

import math

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.structured.banned_sequences import BannedSequences

Ranked = list[tuple[int, float]]
"""Token ids and their log-probabilities, the likeliest first."""


class RankedBans:
    """A search's bans. The distribution is the model's own: banned tokens are passed over."""

    def __init__(
        self,
        params: SamplingParams,
        end_ids: frozenset[int],
        *,
        field: str,
        num_needed: int,
        vocab_size: int,
        max_ranked: int,
        bans: BannedSequences | None,
    ) -> None:
        """``field``: the parameter that decides ``num_needed``, how many tokens have to be known;
        ``max_ranked``: the most that can be. Raises UserError for more than that."""
        self._field = field
        self._value = getattr(params, field)
        self._num_needed = num_needed
        if num_needed > max_ranked:
            raise UserError(
                f"{field} is {self._value}: the {num_needed} likeliest tokens have to be "
                f"compared, and option.max_logprobs is {max_ranked}; lower {field}, or raise it",
                field=field,
            )
        has_bans = bans is not None or params.banned_token_ids or params.min_new_tokens
        self.num_ranked = min(vocab_size, max_ranked) if has_bans else num_needed
        """Tokens behind each text that ``allowed`` wants."""
        self._ranks_all = self.num_ranked == vocab_size
        self._min_new_tokens = params.min_new_tokens
        self._banned_ids = frozenset(params.banned_token_ids)
        self._end_ids = end_ids
        self._bans = bans

    def allowed(self, ranked: Ranked, generated: list[int]) -> Ranked:
        """What a text may go on with whose output so far is ``generated``. UserError where what
        isn't ranked may be better than what is left of what is."""
        banned = self._banned(generated)
        allowed = [(i, p) for i, p in ranked if i not in banned and p > -math.inf]
        if banned and len(allowed) < self._num_needed and not self._ranks_all:
            field = self._field
            raise UserError(
                f"{field} is {self._value}: of the {self.num_ranked} likeliest tokens bans "
                f"leave {len(allowed)}, but {self._num_needed} are compared; ban less, lower "
                f"{field}, or raise option.max_logprobs",
                field=field,
            )
        return allowed

    def _banned(self, generated: list[int]) -> frozenset[int]:
        banned = self._banned_ids
        if len(generated) < self._min_new_tokens:
            banned |= self._end_ids
        if self._bans is not None:
            banned |= frozenset(self._bans.banned_after(generated).tolist())
        return banned
