"""A step as plain arrays, for what executes in Python."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


class _NativeStep(Protocol):
    def view(self, name: str) -> npt.NDArray[np.generic]: ...


class _BlockTables(Protocol):
    def row(self, row: int) -> list[int]: ...


def _none() -> IntArray:
    return np.zeros(0, np.int32)


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
    token_types: IntArray = field(default_factory=_none)
    adapter_first_rows: IntArray = field(default_factory=_none)
    adapter_num_rows: IntArray = field(default_factory=_none)
    adapter_slots: IntArray = field(default_factory=_none)

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

    def slots_at(self, rows: IntArray, positions: IntArray, block_size: int) -> IntArray:
        """Of token rows the slots of other ``positions`` of their sequences."""
        sequences = np.searchsorted(self.first_rows, rows, "right") - 1
        blocks = self.block_tables[self.table_rows[sequences], positions // block_size]
        slots: IntArray = (blocks * block_size + positions % block_size).astype(np.int32)
        return slots

    def sequence(self, seq: int) -> StepArrays:
        """A step of all rows of sequence ``seq``, which has no adapter."""
        first, count = int(self.first_rows[seq]), int(self.num_rows[seq])
        rows = slice(first, first + count)
        wanted = self.logit_token_rows[
            (self.logit_token_rows >= first) & (self.logit_token_rows < first + count)
        ]
        zero = np.zeros(1, np.int32)
        return StepArrays(
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            slots=self.slots[rows],
            token_types=self.token_types[rows],
            first_rows=zero,
            num_rows=self.num_rows[seq : seq + 1],
            kv_lengths=self.kv_lengths[seq : seq + 1],
            table_rows=zero,
            block_tables=self.block_tables[self.table_rows[seq]][np.newaxis],
            logit_token_rows=wanted - np.int32(first),
            sampling_rows=zero[:0],
            target_ids=zero[:0],
            copy_src=zero[:0],
            copy_dst=zero[:0],
        )

    def row(self, seq: int, row: int) -> StepArrays:
        """A step of token row ``row`` alone, which is one of sequence ``seq``."""
        position = self.positions[row : row + 1]
        zero = np.zeros(1, np.int32)
        first_rows = self.adapter_first_rows
        is_adapted = (first_rows <= row) & (row < first_rows + self.adapter_num_rows)
        slots = self.adapter_slots[is_adapted]
        return StepArrays(
            token_ids=self.token_ids[row : row + 1],
            positions=position,
            slots=self.slots[row : row + 1],
            first_rows=zero,
            num_rows=zero + 1,
            kv_lengths=position + 1,
            table_rows=zero,
            block_tables=self.block_tables[self.table_rows[seq]][np.newaxis],
            logit_token_rows=zero[: int(row in self.logit_token_rows)],
            sampling_rows=zero[:0],
            target_ids=zero[:0],
            copy_src=zero[:0],
            copy_dst=zero[:0],
            token_types=self.token_types[row : row + 1],
            adapter_first_rows=zero[: len(slots)],
            adapter_num_rows=zero[: len(slots)] + 1,
            adapter_slots=slots,
        )
