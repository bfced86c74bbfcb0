"""Tokens that are guessed, computed in one step and kept as far as they are what is sampled.

Each row samples with the random numbers, penalties, bans and grammar of its own position, as they
are behind the drafts before it: what is kept are the tokens that steps of one row would have given,
with the same log-probabilities to the bit. So drafts decide how many steps a text takes, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from lmi_core import _native
from lmi_core.engine.head_drafts import HeadDrafts
from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.model_drafts import ModelDrafts
from lmi_core.engine.plan import Plan
from lmi_core.engine.sequence import DraftedBy, Sequence
from lmi_core.engine.stats import EngineTotals
from lmi_core.engine.text_drafts import Draft, DraftSource, TextDrafts
from lmi_core.runners.runner import DraftingRunner, DraftRunner, HeadRunner, Runner, RunnerInfo
from lmi_core.settings.speculation_config import SpeculationConfig
from lmi_core.weights.formats import FloatArray

_LEAST_EXPECTED = 1.0
"""Right drafts of a sequence that waits for its tokens while others run ahead: it is in every
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
        self.costs = _native.StepCosts()
        self._model: ModelDrafts | None = None
        self._heads: HeadDrafts | None = None
        sizes = {"block_size": memory.block_size, "max_depth": max_draft_tokens}
        if drafter is not None and info.has_draft_heads:
            self._model = self._heads = HeadDrafts(cast(HeadRunner, drafter), self.costs, **sizes)
        elif drafter is not None:
            self._model = ModelDrafts(drafter, self.costs, **sizes)

    @property
    def has_heads(self) -> bool:
        """Whether drafts come of the hidden states of steps behind which none is in flight."""
        return self._heads is not None

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
        depths = self.costs.depths(
            plan.num_tokens,
            len(plan.sequences) + expected,
            [draft.chances for _, draft in offers],
            num_rows,
            ahead=self._goes_on(plan),
        )
        num_drafting = len(offers) + sum(bool(sequence.drafts) for sequence in plan.sequences)
        others_run_ahead = num_drafting < len(plan.sequences) and self._info.runs_ahead
        for (sequence, draft), depth in zip(offers, depths, strict=True):
            if not depth or (others_run_ahead and sum(draft.chances[:depth]) < _LEAST_EXPECTED):
                continue
            self._give(plan, sequence, draft.token_ids[:depth], num_running, draft.source)

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
            depths = [(s, d) for s, d in depths if model.expected(s, d) >= _LEAST_EXPECTED]
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
            and all(each.is_plain and each.matcher is None for each in plan.sequences)
        )

    def settle(self, plan: Plan) -> None:
        """The plan's step is completed: what its sequences' drafts are is known."""
        if plan.chain is not None and self._model is not None:
            self._model.settle(plan.chain, plan.step)

    def keep_states(self, plan: Plan, states: FloatArray | None) -> None:
        """What heads go on from, by logit rows of the step that was committed."""
        if self._heads is not None:
            self._heads.keep(plan.outputs, states)

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
        chances = [self._source.next_chances(s, self._max_draft_tokens) for s in sequences]
        if not any(chances):
            return sequences
        count, most = len(sequences), self._info.max_logit_rows - len(sequences)
        depths = self.costs.depths(count, count, chances, most, ahead=True)
        if all(depths):
            return []
        return [
            sequence
            for sequence, each, depth in zip(sequences, chances, depths, strict=True)
            if sum(each[:depth]) < _LEAST_EXPECTED
        ]

    def _waiting_for_model(
        self, model: ModelDrafts, sequences: list[Sequence]
    ) -> frozenset[Sequence]:
        wanted = [sequence for sequence in sequences if model.takes(sequence)]
        count = len(sequences)
        most = self._info.max_logit_rows - count
        depths = model.depths(wanted, count, count, most, ahead=True)
        alone = len(wanted) == count or model.is_trying
        return frozenset(s for s, d in depths if alone or model.expected(s, d) >= _LEAST_EXPECTED)

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


def _decodes(sequence: Sequence) -> bool:
    return (
        sequence.num_scheduled == 1
        and sequence.num_computed + 1 == len(sequence.token_ids)
        and sequence.num_generated > 0
        and not sequence.is_scoring_prompt
        and sequence.request.search is None
        and not sequence.request.has_sequence_biases
    )
