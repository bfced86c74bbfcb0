"""Tokens that are guessed, computed in one step and kept as far as they are what is sampled.

Each row samples with the random numbers, penalties, bans and grammar of its own position, as they
are behind the drafts before it: what is kept are the tokens that steps of one row would have given,
with the same log-probabilities to the bit. So drafts decide how many steps a text takes, and
nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

from lmi_core.engine.commit import Commit
from lmi_core.engine.head_drafts import HeadDrafts
from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.model_drafts import ModelDrafts
from lmi_core.engine.policy import Plan
from lmi_core.engine.sequence import DraftedBy, Sequence
from lmi_core.engine.stats import EngineTotals
from lmi_core.engine.step_costs import StepCosts
from lmi_core.engine.text_drafts import Draft, DraftSource, TextDrafts
from lmi_core.runners.runner import DraftingRunner, DraftRunner, HeadRunner, Runner, RunnerInfo
from lmi_core.settings.speculation_config import SpeculationConfig
from lmi_core.weights.formats import FloatArray

if TYPE_CHECKING:
    from lmi_core._native import Step

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
        drafter: DraftRunner | None = None,
    ) -> None:
        """``max_draft_tokens``: of a sequence in a step; ``drafter``: of a draft model."""
        self._source = source
        self._info = info
        self._memory = memory
        self._totals = totals
        self._max_draft_tokens = max_draft_tokens
        self.costs = StepCosts()
        self._model: ModelDrafts | None = None
        self._heads: HeadDrafts | None = None
        sizes = {"block_size": memory.block_size, "max_depth": max_draft_tokens}
        if drafter is not None and info.has_draft_heads:
            self._model = self._heads = HeadDrafts(cast(HeadRunner, drafter), self.costs, **sizes)
        elif drafter is not None:
            self._model = ModelDrafts(drafter, self.costs, **sizes)

    def add_drafts(self, plan: Plan, sequences: Iterable[Sequence], num_running: int) -> None:
        """Let those of ``sequences``, which are in the plan, that decode compute drafts, too."""
        num_rows = min(
            self._info.max_num_batched_tokens - plan.num_tokens,
            self._info.max_logit_rows - _num_logit_rows(plan),
        )
        offers = self._offers(sequences) if num_rows > 0 else []
        expected = 0.0
        if self._model is not None and offers:
            expected = self._draft_by_model(self._model, plan, offers, num_rows, num_running)
            num_rows -= sum(len(sequence.drafts) for sequence, _ in offers)
        drafts = [(sequence, draft) for sequence, draft in offers if draft and not sequence.drafts]
        if drafts and num_rows > 0:
            self._add_known(plan, drafts, num_rows, num_running, expected)

    def _add_known(
        self,
        plan: Plan,
        offers: list[tuple[Sequence, Draft]],
        num_rows: int,
        num_running: int,
        expected: float,
    ) -> None:
        """Give sequences drafts whose tokens are known; ``expected``: what others bring."""
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
        num_tokens = len(plan.sequences) + round(expected)
        count = self.costs.num_worthwhile(num_base, num_tokens, chances, ahead=self._goes_on(plan))
        depths = Counter(i for _, i in order[:count])
        num_drafting = len(offers) + sum(bool(sequence.drafts) for sequence in plan.sequences)
        others_run_ahead = num_drafting < len(plan.sequences) and self._info.runs_ahead
        for i, (sequence, draft) in enumerate(offers):
            expected = sum(draft.chances[: depths[i]])
            # Beside sequences that run ahead it would be in every second step only.
            if depths[i] and not (others_run_ahead and expected < 1.0):
                token_ids = draft.token_ids[: depths[i]]
                self._give(plan, sequence, token_ids, num_running, draft.source)

    def _draft_by_model(
        self,
        model: ModelDrafts,
        plan: Plan,
        offers: list[tuple[Sequence, Draft | None]],
        num_rows: int,
        num_running: int,
    ) -> float:
        """Let a chain of draft steps run before the plan's, where that pays; returns how many of
        its drafts will likely be right."""
        wanted = [
            sequence
            for sequence, draft in offers
            if model.takes(sequence)
            and model.can_go_on(sequence)
            and (draft is None or draft.chances[0] < model.chance(sequence))
        ]
        depths = model.depths(
            wanted, plan.num_tokens, len(plan.sequences), num_rows, ahead=self._goes_on(plan)
        )
        has_others = len(wanted) < len(plan.sequences)
        if has_others and self._info.runs_ahead and not model.is_trying:
            # As above, beside sequences that run ahead.
            depths = [(s, depth) for s, depth in depths if model.expected(s, depth) >= 1.0]
        room = [
            (sequence, depth)
            for sequence, most in depths
            if (depth := self._memory.draft_room(sequence, most, num_running))
        ]
        if not room:
            return 0.0
        beside_others = len(plan.sequences) > 1
        plan.chain = chain = model.begin(room, beside_others=beside_others)
        for sequence, depth in room:
            if sequence in chain.rows:
                self._give(plan, sequence, [0] * depth, num_running, "model")
        return sum(model.expected(sequence, len(sequence.drafts)) for sequence in chain.rows)

    def _goes_on(self, plan: Plan) -> bool:
        """Whether the steps behind the plan are submitted ahead, if it has no drafts."""
        return (
            self._info.runs_ahead
            and plan.chain is None
            and not any(_needs_tokens(sequence) for sequence in plan.sequences)
        )

    def settle(self, plan: Plan, step: Step) -> None:
        """The plan's step is completed: what its sequences' drafts are is known."""
        if plan.chain is not None and self._model is not None:
            self._model.settle(plan.chain, step)

    def keep_states(self, commit: Commit, states: FloatArray) -> None:
        """What heads go on from, by logit rows of the step that was committed."""
        if self._heads is not None:
            self._heads.keep(commit.outputs, states)

    def _offers(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, Draft | None]]:
        """The sequences that drafts may be for, with those from texts and grammars."""
        offers: list[tuple[Sequence, Draft | None]] = []
        for sequence in sequences:
            if not _decodes(sequence):
                continue
            num_left = sequence.max_len - len(sequence.token_ids) - 1
            num_tokens = min(self._max_draft_tokens, num_left)
            if num_tokens > 0:
                draft = self._source.draft(sequence, num_tokens)
                offers.append((sequence, draft if draft and draft.token_ids else None))
        return offers

    def _give(
        self,
        plan: Plan,
        sequence: Sequence,
        token_ids: list[int],
        num_running: int,
        source: DraftedBy,
    ) -> None:
        # Nothing follows the end of a text.
        if source != "model":  # whose tokens aren't known yet
            ends = [i for i, token_id in enumerate(token_ids) if token_id in sequence.end_ids]
            del token_ids[ends[0] if ends else len(token_ids) :]
        room = self._memory.draft_room(sequence, len(token_ids), num_running)
        sequence.drafts = token_ids[:room]
        sequence.drafted_by = source
        sequence.num_scheduled += len(sequence.drafts)
        plan.num_tokens += len(sequence.drafts)

    def without_waiting(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those of sequences in flight that needn't wait for their tokens to guess what follows."""
        if self._model is not None:
            drafting = self._waiting_for_model(self._model, sequences)
            sequences = [sequence for sequence in sequences if sequence not in drafting]
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

    def _waiting_for_model(
        self, model: ModelDrafts, sequences: list[Sequence]
    ) -> frozenset[Sequence]:
        wanted = [sequence for sequence in sequences if model.takes(sequence)]
        count = len(sequences)
        most = self._info.max_logit_rows - count
        depths = model.depths(wanted, count, count, most, ahead=True)
        alone = len(wanted) == count or model.is_trying
        return frozenset(s for s, depth in depths if alone or model.expected(s, depth) >= 1.0)

    def count(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Note what became of a sequence's drafts."""
        totals = self._totals
        totals.num_drafts += 1
        totals.num_draft_tokens += num_drafted
        totals.num_accepted_tokens += num_accepted
        if sequence.drafted_by == "grammar":
            totals.num_grammar_draft_tokens += num_drafted
            totals.num_grammar_accepted_tokens += num_accepted
        elif sequence.drafted_by == "model" and self._model is not None:
            totals.num_model_draft_tokens += num_drafted
            totals.num_model_accepted_tokens += num_accepted
            self._model.count(sequence, num_drafted, num_accepted)

    def end(self, sequence: Sequence) -> None:
        self._source.end(sequence)
        if self._model is not None:
            self._model.end(sequence)


def speculation_of(
    config: SpeculationConfig | None, runner: Runner, memory: KvMemory, totals: EngineTotals
) -> Speculation | None:
    """None where nothing is drafted: it isn't asked for, or the runner can't verify it."""
    info = runner.info
    if config is None or not info.verifies_drafts:
        return None
    source = TextDrafts(config)
    drafter = cast(DraftingRunner, runner).drafter if info.draft_model else None
    most = config.max_draft_tokens
    return Speculation(source, info, memory, totals, max_draft_tokens=most, drafter=drafter)


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
