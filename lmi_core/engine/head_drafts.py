"""Drafts of heads that guess from one hidden state each, without any text."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from lmi_core.engine.model_drafts import DraftChain, ModelDrafts
from lmi_core.engine.plan import Output
from lmi_core.engine.sequence import Sequence
from lmi_core.runners.runner import HeadRunner
from lmi_core.weights.formats import FloatArray

if TYPE_CHECKING:
    from lmi_core._native import StepCosts


class HeadDrafts(ModelDrafts):
    """Drafts of heads, which go on from the last hidden state of a sequence's text. It is kept
    where no later step is in flight, which takes its place."""

    def __init__(
        self, runner: HeadRunner, target_costs: StepCosts, *, block_size: int, max_depth: int
    ) -> None:
        depth = min(max_depth, runner.num_heads)
        super().__init__(runner, target_costs, block_size=block_size, max_depth=depth)
        self._heads = runner
        self._lengths: dict[Sequence, int] = {}
        """Of the texts whose states were kept."""

    def _num_behind(self, sequence: Sequence) -> int:
        return 1

    def can_go_on(self, sequence: Sequence) -> bool:
        return self._lengths.get(sequence) == len(sequence.token_ids)

    def keep(self, outputs: Items[Output], states: FloatArray | None) -> None:
        """Note the hidden states behind a step's outputs, of logit rows; None: the heads have
        them."""
        for sequence, logit_row in {o.sequence: o.logit_row for o in outputs}.items():
            if sequence.row >= 0:
                if states is not None and self._heads.states is not None:
                    self._heads.states[sequence.row] = states[logit_row]
                self._lengths[sequence] = len(sequence.token_ids)

    def begin(self, depths: Items[tuple[Sequence, int]], *, beside_others: bool) -> DraftChain:
        self._note_begun(sequence for sequence, _ in depths)
        chain, buffers = DraftChain(), self._runner.next_steps()
        for i in range(max(depth for _, depth in depths)):
            step = buffers[i]
            step.clear()
            for sequence, depth in depths:
                if depth > i:
                    row, position = sequence.row, len(sequence.token_ids) + i - 1
                    rows = chain.rows.setdefault(sequence, [])
                    rows.append(step.add([row], position, row, row, "last"))
            chain.steps.append(step)
        chain.mask(self._runner)
        return chain

    def end(self, sequence: Sequence) -> None:
        super().end(sequence)
        self._lengths.pop(sequence, None)
