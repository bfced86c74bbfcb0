"""Logits processors of Transformers that are plain functions of a text's ids and its logits.

Penalties, ``no_repeat_ngram_size``, ``bad_words_ids``, ``min_new_tokens`` and ``suppress_tokens``
(``banned_token_ids``) are fields of ``SamplingParams`` itself, since other engines have them, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from lmi_core.engine.param_checks import check_float, check_ids, check_int
from lmi_core.errors import UserError

_MAX_BIASED, _MAX_BIASED_TOKENS = 1024, 64
"""Sequences of a request that have a bias, and tokens of each."""
_MAX_BIAS = 1e9
_LENGTH_PENALTY = "exponential_decay_length_penalty"
_SCALED_OR_CUT = (
    _LENGTH_PENALTY,
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
)
_IN_SEARCHES = ("begin_suppress_tokens", "encoder_no_repeat_ngram_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessors:
    """By the names that Transformers' ``generate`` has for them."""

    begin_suppress_tokens: tuple[int, ...] = ()
    """Not the first of a text; where ``forced_bos_token_id`` is that, not the second."""
    forced_bos_token_id: int | None = None
    """The first token of a text that begins with it, whatever else says of it but
    ``suppress_tokens``: behind a prompt of one token, or an encoder's, where it comes in the place
    of one that the model forces. Longer prompts have begun already, which this leaves as they are.
    """
    forced_eos_token_id: tuple[int, ...] = ()
    """Of which one is the last token where a text is as long as it may be."""
    encoder_no_repeat_ngram_size: int = 0
    """So many tokens in a row of the prompt don't come again; 0: off."""
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    """Added to the logit of a sequence's last token, where the others come directly before it."""
    exponential_decay_length_penalty: tuple[int, float] | None = None
    """Behind so many tokens of a text, logits of ids that end it grow by their amount times the
    factor to the power of the tokens since then, less 1."""
    encoder_repetition_penalty: float = 1.0
    """Above 1 the prompt's tokens are likelier: times a logit above 0, a divisor of others."""
    epsilon_cutoff: float = 0.0
    """Tokens less likely than that aren't sampled; the likeliest always may be."""
    eta_cutoff: float = 0.0
    """Nor those below the lower of it and its square root times exp(-entropy), of what is left
    (Hewitt et al. 2022)."""

    def validate(self, *, vocab_size: int, is_search: bool) -> None:
        """Raise UserError naming the first field out of range, or that a search doesn't have."""
        check_ids("begin_suppress_tokens", self.begin_suppress_tokens, vocab_size)
        check_int("forced_bos_token_id", self.forced_bos_token_id, 0, vocab_size - 1)
        check_ids("forced_eos_token_id", self.forced_eos_token_id, vocab_size)
        check_int("encoder_no_repeat_ngram_size", self.encoder_no_repeat_ngram_size, 0, None)
        check_float("encoder_repetition_penalty", self.encoder_repetition_penalty, 0.001, 100.0)
        check_float("epsilon_cutoff", self.epsilon_cutoff, 0.0, 1.0)
        check_float("eta_cutoff", self.eta_cutoff, 0.0, 1.0)
        if self.exponential_decay_length_penalty is not None:
            name, (start, factor) = _LENGTH_PENALTY, self.exponential_decay_length_penalty
            check_int(name, start, 0, 2**31 - 1, " (the tokens before it)")
            what = f"the factor of {name}"
            check_float(name, factor, 0.0, 100.0, open_low=True, what=what)
        self._check_biases(vocab_size)
        for name in self.names if is_search else ():
            if name not in _IN_SEARCHES:
                raise UserError(
                    f"{name} doesn't go with num_beams or penalty_alpha: leave one of them out",
                    field=name,
                )

    def check_plain(self) -> None:
        """Raise UserError naming the first field that scales logits or cuts tokens off, for steps
        that C++ launches on GPUs, whose sampler does neither."""
        for name in self.names:
            if name in _SCALED_OR_CUT:
                raise UserError(
                    f"{name} is not among what the CUDA kernels that C++ launches sample by: leave "
                    "it out, or start with LMI_OPS=launch:torch",
                    field=name,
                )

    @property
    def names(self) -> list[str]:
        """Of those that are asked for."""
        return [each.name for each in fields(self) if getattr(self, each.name) != each.default]

    @property
    def num_ids(self) -> int:
        """Token ids in lists, the sequences' included."""
        lists = (self.begin_suppress_tokens, self.forced_eos_token_id)
        return sum(map(len, lists)) + sum(len(ids) for ids, _ in self.sequence_bias)

    def _check_biases(self, vocab_size: int) -> None:
        name = "sequence_bias"
        if len(self.sequence_bias) > _MAX_BIASED:
            count = len(self.sequence_bias)
            raise UserError(
                f"{name} has {count} sequences; at most {_MAX_BIASED} are allowed", field=name
            )
        for token_ids, bias in self.sequence_bias:
            if not 1 <= len(token_ids) <= _MAX_BIASED_TOKENS:
                raise UserError(
                    f"a sequence of {name} has {len(token_ids)} token ids; allowed are 1 to "
                    f"{_MAX_BIASED_TOKENS}",
                    field=name,
                )
            check_ids(name, token_ids, vocab_size)
            what = f"{name} of {list(token_ids)[:4]}"
            check_float(name, bias, -_MAX_BIAS, _MAX_BIAS, what=what)

    def forced_end_ids(self, of_model: tuple[int, ...]) -> tuple[int, ...]:
        """Of which one is the last token of a text as long as it may be; empty: it is free."""
        return self.forced_eos_token_id or of_model

    def check_possible(self, banned_ids: tuple[int, ...], vocab_size: int) -> None:
        """Raise UserError naming the first field that ``banned_ids`` leave nothing of."""
        banned = frozenset(banned_ids)
        begin_ids = () if self.forced_bos_token_id is None else (self.forced_bos_token_id,)
        for name, forced in (
            ("forced_bos_token_id", begin_ids),
            ("forced_eos_token_id", self.forced_eos_token_id),
        ):
            if forced and banned.issuperset(forced):
                raise UserError(
                    f"{name} forces {list(forced)}, which suppress_tokens bans: leave one of them "
                    "out",
                    field=name,
                )
        for name, all_banned in (
            ("suppress_tokens", banned),
            ("begin_suppress_tokens", banned.union(self.begin_suppress_tokens)),
        ):
            if len(all_banned) >= vocab_size:
                raise UserError(f"{name} leaves no token that may be generated", field=name)

    def row_settings(
        self, prompt_ids: Sequence[int], end_ids: npt.NDArray[np.int32], num_begun: int
    ) -> dict[str, Any]:
        """Of a row of the sampling table, whose text ends with ``end_ids``; ``num_begun``: of the
        output's tokens, as Transformers counts them, that came before the first one here."""
        settings: dict[str, Any] = {
            "epsilon_cutoff": self.epsilon_cutoff,
            "eta_cutoff": self.eta_cutoff,
        }
        if self.encoder_repetition_penalty != 1.0:
            settings["prompt_reward"] = self.encoder_repetition_penalty
            settings["prompt_ids"] = np.unique(np.array(prompt_ids, np.int32))
        if self.exponential_decay_length_penalty is not None:
            start, settings["length_factor"] = self.exponential_decay_length_penalty
            settings["length_start"] = start - num_begun
            settings["length_ids"] = end_ids
        return settings


NO_PROCESSORS = LogitsProcessors()
