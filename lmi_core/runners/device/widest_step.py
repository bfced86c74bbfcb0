"""A step that takes as much memory as any: full, with long contexts and costly sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lmi_core import _native
from lmi_core.ops.device.sampling_inputs import SamplingInputs
from lmi_core.ops.device.step_arrays import StepArrays

if TYPE_CHECKING:
    from lmi_core.runners.step_memory import StepMemory, StepSizes
    from lmi_core.settings.engine_config import EngineConfig


def widest_arrays(
    num_tokens: int,
    sizes: StepSizes,
    *,
    max_num_seqs: int,
    block_size: int,
    has_long_prefills: bool,
) -> StepArrays:
    """So many token rows of as many sequences as there can be, those with one row at the longest
    context; all in block 0, whose content is of no account. ``has_long_prefills``: the others are
    at the longest context too, which takes time and, where attention gathers it, memory."""
    num_rows = _spread(num_tokens, sizes, max_num_seqs)
    num_seqs = len(num_rows)
    lengths = np.full(num_seqs, sizes.max_model_len, np.int32)
    if not has_long_prefills:
        lengths[num_rows > 1] = num_rows[num_rows > 1]
    spans = zip(lengths.tolist(), num_rows.tolist(), strict=True)
    positions = np.concatenate([np.arange(end - count, end) for end, count in spans])
    positions = positions.astype(np.int32)
    empty = np.zeros(0, np.int32)
    return StepArrays(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        slots=positions % np.int32(block_size),
        first_rows=(np.cumsum(num_rows) - num_rows).astype(np.int32),
        num_rows=num_rows,
        kv_lengths=lengths,
        table_rows=np.arange(num_seqs, dtype=np.int32),
        block_tables=np.zeros((num_seqs, sizes.max_blocks_per_seq), np.int32),
        logit_token_rows=np.zeros(sizes.max_logit_rows, np.int32),
        sampling_rows=empty,
        target_ids=empty,
        copy_src=empty,
        copy_dst=empty,
    )


def _spread(num_tokens: int, sizes: StepSizes, max_num_seqs: int) -> npt.NDArray[np.int32]:
    """The rows of as many sequences as there can be: the first ones have all they can have."""
    num_rows = np.ones(min(max_num_seqs, num_tokens), np.int32)
    left = num_tokens - len(num_rows)
    for seq in range(len(num_rows)):
        more = min(left, sizes.max_model_len - 1)
        num_rows[seq] += more
        left -= more
    return num_rows


def fill_widest(
    memory: StepMemory, num_tokens: int, sizes: StepSizes, config: EngineConfig
) -> None:
    """The same in the first of a runner's step buffers, with long contexts for single rows only;
    every row is changed, filtered, drawn and reported."""
    step = memory.steps[0]
    for seq, num_rows in enumerate(_spread(num_tokens, sizes, config.max_num_seqs).tolist()):
        memory.block_tables.set(seq, [0] * sizes.max_blocks_per_seq)
        memory.sampling.set(
            seq,
            temperature=1.0,
            top_k=0,
            top_p=0.9,
            min_p=0.0,
            typical_p=0.9,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            seed=0,
            choice=0,
            num_logprobs=sizes.max_logprobs,
            biases=_native.LogitBiases([0], [1.0]),
            banned_ids=[],
            min_tokens=0,
            min_tokens_banned_ids=[],
        )
        start = sizes.max_model_len - 1 if num_rows == 1 else 0
        step.add([0] * num_rows, start, seq, seq, "last")


def widest_sampling(num_rows: int, max_logprobs: int) -> SamplingInputs:
    """Every row changed, filtered, drawn and reported."""
    rows, zeros = np.arange(num_rows, dtype=np.int32), np.zeros(num_rows, np.int32)
    ones, floats = np.ones(num_rows, np.float32), np.zeros(num_rows, np.float32)
    no_edits = zeros[:0], zeros[:0], floats[:0]
    return SamplingInputs(
        is_sampled=np.ones(num_rows, np.bool_),
        target_ids=zeros - 1,
        num_top=np.full(num_rows, max_logprobs, np.int32),
        temperature=ones,
        top_k=zeros,
        top_p=ones * np.float32(0.9),
        min_p=floats,
        typical_p=ones * np.float32(0.9),
        epsilon_cutoff=floats,
        eta_cutoff=floats,
        repetition_penalty=ones,
        presence_penalty=floats,
        frequency_penalty=floats,
        seed=zeros.astype(np.uint64),
        choice=zeros,
        position=zeros,
        uniform=np.full(num_rows, 0.5),
        biases=(rows, zeros, ones),
        seen=no_edits,
        scales=(*no_edits, floats[:0]),
        bans=no_edits,
        masks=lambda: (zeros[:0], np.zeros((0, 1), np.uint32)),
    )
