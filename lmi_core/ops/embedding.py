"""Rows by token id, and the rows whose logits are wanted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmi_core.ops.recorder import Handle, Recorder


def embed(recorder: Recorder, table: npt.NDArray[np.generic], *, scale: float = 1.0) -> Handle:
    """Rows of ``table`` [vocab, hidden] (fp32, or bf16 as uint16) -> fp32 [T, hidden]."""
    return recorder.embed(table, scale)


def add_positions(x: Handle, table: npt.NDArray[np.generic], *, offset: int = 0) -> Handle:
    """x + the row of ``table`` of each token's position + ``offset``: fp32 [T, n], in place."""
    return x.recorder.add_positions(x, table, offset)


def gather_logit_rows(x: Handle) -> Handle:
    """fp32 [T, n] -> fp32 [L, n]: the rows whose logits are wanted."""
    return x.recorder.gather_logit_rows(x)
