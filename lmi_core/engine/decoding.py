"""What every token of a plain text takes: one more row in the step behind, and its taking over.

Where a model is small, or a batch large, this is what a step's end and the next one's begin consist
of. So it is written out, without a call per sequence that most don't need.
"""

from __future__ import annotations

from collections.abc import Iterable

from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.plan import Output
from lmi_core.engine.queues import Queues
from lmi_core.engine.sequence import Sequence


def going_on(sequences: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]] | None:
    """Of a step in flight, those that decode on behind it, and those whose prompts do, but for
    those that speculate; None where the result of any matters for more than its token."""
    decoding, prompts = [], []
    for sequence in sequences:
        if sequence.drafts or sequence.is_ending:
            continue
        num_known = len(sequence.token_ids)
        is_whole = sequence.num_computed + sequence.num_scheduled == num_known
        if is_whole:
            if not sequence.is_plain:
                return None
            if num_known + 1 < sequence.max_len:
                decoding.append(sequence)
        elif sequence.is_scoring_prompt or sequence.request.search is not None:
            return None
        else:
            prompts.append(sequence)
    return decoding, prompts


def lacking_room(sequences: list[Sequence], num_ahead: int, block_size: int) -> list[Sequence]:
    """Those whose blocks are full with the tokens that are known and ``num_ahead`` more."""
    return [s for s in sequences if len(s.token_ids) + num_ahead > len(s.block_ids) * block_size]


def take_plain(
    sequence: Sequence, sampled: list[int], memory: KvMemory, contested: Queues | None
) -> Output | None:
    """Take over, of a completed step, what is one more token of a plain sequence; ``sampled``: by
    logit row; ``contested``: the queues, where several tenants have something open. None for one
    that isn't plain, has a grammar, had its prompt's end computed, or ends: nothing was done."""
    row, end = sequence.logit_row, sequence.num_computed + 1
    token_ids = sequence.token_ids
    num_tokens = len(token_ids)
    if (
        not sequence.is_plain
        or sequence.matcher is not None
        or sequence.num_scheduled != 1
        or end != num_tokens
        or end == sequence.num_prompt
        or sequence.is_ending
        or num_tokens + 1 >= sequence.max_len
    ):
        return None
    token_id = sampled[row]
    if token_id < 0 or token_id in sequence.end_ids:
        return None
    sequence.num_scheduled, sequence.num_ahead = sequence.num_ahead, 0
    sequence.logit_row = sequence.ahead_row
    sequence.num_computed = end
    if end % memory.block_size == 0:
        memory.publish(sequence)
    token_ids.append(token_id)
    if contested is not None:
        contested.note_generated(sequence)
    if sequence.needs_observe and not sequence.num_scheduled:  # a step behind does so itself
        memory.observe(sequence, token_id)
    return Output(sequence, token_id, row, num_tokens + 1 - sequence.num_prompt, None)
