"""A step as plain arrays, for recorders that execute in Python."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


class _NativeStep(Protocol):
    def view(self, name: str) -> npt.NDArray[np.generic]: ...


class _BlockTables(Protocol):
    def row(self, row: int) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """The inputs of a step, int32, named as in ``csrc/graph/step.h``."""

    token_ids: IntArray
    positions: IntArray
    slots: IntArray
    first_rows: IntArray
    num_rows: IntArray
    kv_lengths: IntArray
    table_rows: IntArray
    block_tables: IntArray
    """[rows, max_blocks_per_seq] block ids."""
    logit_token_rows: IntArray
    sampling_rows: IntArray
    target_ids: IntArray
    copy_src: IntArray
    copy_dst: IntArray

    @classmethod
    def of(cls, step: _NativeStep, block_tables: _BlockTables) -> StepArrays:
        """A copy of a native step's inputs, with the block tables of its sequences only."""
        names = {field.name for field in fields(cls)} - {"block_tables", "table_rows"}
        arrays = {name: np.array(step.view(name), dtype=np.int32) for name in names}
        tables = [block_tables.row(int(row)) for row in step.view("table_rows")]
        rows = np.zeros((len(tables), max(map(len, tables), default=0)), np.int32)
        for row, block_ids in zip(rows, tables, strict=True):
            row[: len(block_ids)] = block_ids
        table_rows = np.arange(len(tables), dtype=np.int32)
        return cls(**arrays, block_tables=rows, table_rows=table_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Per logit row: logits, the sampled id (-1: none), log-probability of it or of the target."""

    logits: npt.NDArray[np.float64]
    sampled_ids: IntArray
    logprobs: npt.NDArray[np.float64]
