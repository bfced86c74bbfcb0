"""A step as plain arrays, for recorders that execute in Python."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


class _NativeStep(Protocol):
    def view(self, name: str) -> npt.NDArray[np.generic]: ...


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
    def of(cls, step: _NativeStep) -> StepArrays:
        """A copy of a native step's inputs."""
        return cls(**{f.name: np.array(step.view(f.name), dtype=np.int32) for f in fields(cls)})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Per logit row: logits, the sampled id (-1: none), log-probability of it or of the target."""

    logits: npt.NDArray[np.float64]
    sampled_ids: IntArray
    logprobs: npt.NDArray[np.float64]
