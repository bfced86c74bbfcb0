"""What the loop and a runner share: the block pool, the tables and the step buffers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmi_core import _native

if TYPE_CHECKING:
    from lmi_core.settings.engine_config import EngineConfig

NUM_STEPS = 3
"""Two are in flight while the results of the one before are delivered."""
MAX_LOGIT_ROWS = 256
"""Rows whose logits one step computes; prompt log-probabilities go in chunks of at most this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """Capacities of a runner's steps; all are final."""

    vocab_size: int
    max_model_len: int
    max_num_tokens: int
    max_logit_rows: int
    max_blocks_per_seq: int

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        vocab_size: int,
        max_positions: int,
        max_num_tokens: int,
        pools: bool = False,
    ) -> StepSizes:
        """``max_num_tokens``: of a step, where ``config`` says nothing. ``pools``: every row may be
        wanted."""
        max_model_len = config.max_model_len or max_positions
        max_num_tokens = config.max_num_batched_tokens or max_num_tokens
        return cls(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_tokens=max_num_tokens,
            max_logit_rows=max(MAX_LOGIT_ROWS, config.max_num_seqs, max_num_tokens * pools),
            max_blocks_per_seq=-(-max_model_len // config.block_size),
        )


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Owned by the loop's thread, but for the one step that was submitted."""

    pool: _native.BlockPool
    block_tables: _native.BlockTables
    sampling: _native.SamplingTable
    steps: tuple[_native.Step, ...]

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        sizes: StepSizes,
        num_blocks: int,
    ) -> StepMemory:
        tables = _native.BlockTables(config.max_num_seqs, sizes.max_blocks_per_seq)
        sampling = _native.SamplingTable(config.max_num_seqs, sizes.vocab_size)
        steps = tuple(
            _native.Step(
                max_tokens=sizes.max_num_tokens,
                max_seqs=config.max_num_seqs,
                max_logit_rows=sizes.max_logit_rows,
                max_logprobs=config.max_logprobs,
                max_copies=config.max_num_seqs,
                block_size=config.block_size,
                block_tables=tables,
                sampling=sampling,
            )
            for _ in range(NUM_STEPS)
        )
        pool = _native.BlockPool(num_blocks, config.block_size, os.urandom(16))
        return cls(pool, tables, sampling, steps)
