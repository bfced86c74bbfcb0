"""A plan's sequences as rows of a step buffer, with the masks that those rows wait for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

from lmi_core.engine.masked_rows import MaskedRows
from lmi_core.engine.model_drafts import DraftChain
from lmi_core.engine.plan import HeldMask, Plan
from lmi_core.engine.sequence import Sequence
from lmi_core.models.pooling_head import LogitRows
from lmi_core.structured.chained_mask import ChainedMask
from lmi_core.structured.mask_threads import MissingMask
from lmi_core.structured.matcher import Matcher

if TYPE_CHECKING:
    from lmi_core._native import Step


def fill(plan: Plan, step: Step) -> list[MissingMask]:
    """Write the plan into a step buffer. Returns the masks that it waits for; a grammar that fails
    leaves its own row without a token."""
    plan.step = step
    step.clear()
    for source, target in plan.copies:
        step.add_copy(source, target)
    masks = add_known(plan.sequences, step, plan.chain)
    if plan.chain is not None:
        plan.chain.lead_to(step)
    return masks


def add_following(sequences: list[Sequence], step: Step) -> list[HeldMask]:
    """Rows of sequences whose tokens the step in flight samples; returns the masks that follow
    those tokens."""
    masks = []
    first = step.add_following(
        [len(sequence.token_ids) for sequence in sequences],
        [sequence.row for sequence in sequences],
        [sequence.request.adapter_slot for sequence in sequences],
    )
    for row, sequence in enumerate(sequences, first):
        sequence.ahead_row, sequence.num_ahead = row, 1
        if sequence.needs_observe:
            step.count_token(row)
        if sequence.matcher is not None:
            masks += [
                HeldMask(sequence, one)
                for one in _masks_from(sequence.matcher, sequence, range(row, row + 1), step)
            ]
    return masks


def add_known(
    sequences: Iterable[Sequence], step: Step, chain: DraftChain | None
) -> list[MissingMask]:
    """Rows of sequences whose tokens are known, but for drafts of ``chain``; returns the masks that
    they wait for."""
    masks: list[MissingMask] = []
    for sequence in sequences:
        masks += _add_one(sequence, step, chain)
    return masks


def _add_one(sequence: Sequence, step: Step, chain: DraftChain | None) -> list[MissingMask]:
    start, num_tokens = sequence.chunk
    end = start + num_tokens
    row, slot = sequence.row, sequence.request.adapter_slot
    token_ids = sequence.token_ids
    if sequence.drafts:
        tokens = [token_ids[-1], *sequence.drafts]
        sequence.logit_row = step.add(tokens, start, row, row, "drafts", slot)
        drafted = None if chain is None else chain.masked.get(sequence)
        rows = range(sequence.logit_row, step.num_logit_rows)
        return _masks_from(sequence.matcher, sequence, rows, step, drafted)
    if sequence.request.is_scoring_prompt and sequence.is_scoring_prompt:
        logit_row = step.add(token_ids[start:end], start, row, row, "all", slot)
        if end < sequence.num_prompt:
            step.set_target(logit_row + end - start - 1, token_ids[end])
        sequence.logit_row = logit_row
    else:
        wanted: LogitRows = "last" if end == len(token_ids) else "none"
        if sequence.row_sum is not None:
            wanted = sequence.row_sum.wanted(start, wanted)
        logit_row = step.add(
            token_ids[start:end], start, row, row, wanted, slot, sequence.num_first
        )
        if sequence.num_ahead:
            sequence.ahead_row = logit_row
        else:
            sequence.logit_row = logit_row
    if end != len(token_ids):
        return []
    rows = range(step.num_logit_rows - 1, step.num_logit_rows)
    return _masks_from(sequence.matcher, sequence, rows, step)


def _masks_from(
    matcher: Matcher | None,
    sequence: Sequence,
    rows: range,
    step: Step,
    drafted: MaskedRows | None = None,
) -> list[MissingMask]:
    """Of logit rows, and of a chain's that ``drafted`` before them."""
    if matcher is None:
        return []
    masks = [step.add_mask(row) for row in rows]
    ready = partial(_masks_ready, sequence, step, rows)
    if drafted is not None:
        return [ChainedMask(matcher, masks, ready, sequence.drafts, drafted)]
    return [MissingMask(matcher, masks, ready, sequence.drafts)]


def _masks_ready(
    sequence: Sequence, step: Step, logit_rows: range, error: Exception | None
) -> None:
    sequence.error = error
    for row in logit_rows:
        step.set_mask_ready(row)
