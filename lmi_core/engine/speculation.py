"""Tokens that are guessed, computed in one step and kept as far as they are what is sampled.

Each row samples with the random numbers, penalties, bans and grammar of its own position, as they
are behind the drafts before it: what is kept are the tokens that steps of one row would have given,
with the same log-probabilities to the bit. So drafts decide how many steps a text takes, and
nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.policy import Plan
from lmi_core.engine.sequence import Sequence
from lmi_core.engine.stats import EngineTotals
from lmi_core.engine.step_costs import StepCosts
from lmi_core.engine.text_drafts import Draft, DraftSource, TextDrafts
from lmi_core.runners.runner import RunnerInfo
from lmi_core.settings.speculation_config import SpeculationConfig

_LEAST_CHANCE = 0.05
"""Of a token, that it is worth thinking about."""
_LEAST_CHANCE_BESIDE_OTHERS = 0.6
"""Of the next draft, for a sequence to wait for its tokens while others run ahead: it is in every
second step then, and has to get more than two tokens of it."""


class Speculation:
    """Puts drafts into planned steps, where nobody else has a use for rows and memory."""

    def __init__(
        self,
        source: DraftSource,
        info: RunnerInfo,
        memory: KvMemory,
        totals: EngineTotals,
        *,
        max_draft_tokens: int,
    ) -> None:
        """``max_draft_tokens``: of a sequence in a step."""
        self._source = source
        self._info = info
        self._memory = memory
        self._totals = totals
        self._max_draft_tokens = max_draft_tokens
        self.costs = StepCosts()

    def add_drafts(self, plan: Plan, sequences: Iterable[Sequence], num_running: int) -> None:
        """Let those of ``sequences``, which are in the plan, that decode compute drafts, too."""
        num_rows = min(
            self._info.max_num_batched_tokens - plan.num_tokens,
            self._info.max_logit_rows - _num_logit_rows(plan),
        )
        offers = self._offers(sequences) if num_rows > 0 else []
        if not offers:
            return
        # A sequence's chances fall, so those that are chosen are its first ones.
        order = sorted(
            (
                (chance, i)
                for i, (_, draft) in enumerate(offers)
                for chance in draft.chances
                if chance > _LEAST_CHANCE
            ),
            key=lambda entry: -entry[0],
        )[:num_rows]
        chances = [chance for chance, _ in order]
        num_base = plan.num_tokens
        num_tokens = len(plan.sequences)
        ahead = self._info.runs_ahead and not any(_needs_tokens(s) for s in plan.sequences)
        count = self.costs.num_worthwhile(num_base, num_tokens, chances, ahead=ahead)
        depths = Counter(i for _, i in order[:count])
        others_run_ahead = len(offers) < len(plan.sequences) and self._info.runs_ahead
        for i, (sequence, draft) in enumerate(offers):
            expected = sum(draft.chances[: depths[i]])
            # Beside sequences that run ahead it would be in every second step only.
            if depths[i] and not (others_run_ahead and expected < 1.0):
                self._give(plan, sequence, draft.token_ids[: depths[i]], num_running)

    def _offers(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, Draft]]:
        offers = []
        for sequence in sequences:
            if not _decodes(sequence):
                continue
            num_left = sequence.max_len - len(sequence.token_ids) - 1
            num_tokens = min(self._max_draft_tokens, num_left)
            draft = self._source.draft(sequence, num_tokens) if num_tokens > 0 else None
            if draft is not None and draft.token_ids:
                offers.append((sequence, draft))
        return offers

    def _give(self, plan: Plan, sequence: Sequence, token_ids: list[int], num_running: int) -> None:
        # Nothing follows the end of a text.
        ends = [i for i, token_id in enumerate(token_ids) if token_id in sequence.end_ids]
        del token_ids[ends[0] if ends else len(token_ids) :]
        room = self._memory.draft_room(sequence, len(token_ids), num_running)
        sequence.drafts = token_ids[:room]
        sequence.num_scheduled += len(sequence.drafts)
        plan.num_tokens += len(sequence.drafts)

    def without_waiting(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those of sequences in flight that needn't wait for their tokens to guess what follows."""
        chances = [self._source.next_chance(sequence) for sequence in sequences]
        order = sorted((c for c in chances if c > _LEAST_CHANCE), reverse=True)
        num_rows, count = len(sequences), 0
        if order:
            count = self.costs.num_worthwhile(num_rows, num_rows, order, ahead=True)
        if count == len(sequences):
            return []
        if not count:
            return sequences
        least = max(order[count - 1], _LEAST_CHANCE_BESIDE_OTHERS)
        return [s for s, chance in zip(sequences, chances, strict=True) if chance < least]

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Note what became of a sequence's drafts."""
        self._totals.num_drafts += 1
        self._totals.num_draft_tokens += num_drafted
        self._totals.num_accepted_tokens += num_accepted

    def end(self, sequence: Sequence) -> None:
        self._source.end(sequence)


def speculation_of(
    config: SpeculationConfig | None, info: RunnerInfo, memory: KvMemory, totals: EngineTotals
) -> Speculation | None:
    """None where nothing is drafted: it isn't asked for, or the runner can't verify it."""
    if config is None or not info.verifies_drafts:
        return None
    source = TextDrafts(config)
    return Speculation(source, info, memory, totals, max_draft_tokens=config.max_draft_tokens)


def _num_logit_rows(plan: Plan) -> int:
    return sum(
        sequence.num_scheduled if sequence.is_scoring_prompt else 1 for sequence in plan.sequences
    )


def _needs_tokens(sequence: Sequence) -> bool:
    """Whether its steps wait for tokens anyway."""
    return sequence.matcher is not None or sequence.needs_observe or not _decodes(sequence)


def _decodes(sequence: Sequence) -> bool:
    return (
        sequence.num_scheduled == 1
        and sequence.num_computed + 1 == len(sequence.token_ids)
        and sequence.num_generated > 0
        and not sequence.is_scoring_prompt
        and sequence.request.search is None
    )
