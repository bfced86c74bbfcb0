"""Rows by token id, and the rows whose logits are wanted."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmi_core.ops.graph import Graph, Handle
from lmi_core.weights.block_matrix import BlockMatrix

Table = npt.NDArray[np.generic] | BlockMatrix


def embed(graph: Graph, table: Table, *, scale: float = 1.0) -> Handle:
    """Rows of ``table`` [vocab, hidden] (fp32, bf16 as uint16, or blocks) -> fp32 [T, hidden]."""
    stored = _stored(table)
    x = graph.value("embed", "fp32", table.shape[1], "T")
    graph.add("embed", x, {}, scale=scale, **stored)
    return x


def add_positions(x: Handle, table: Table, *, offset: int = 0) -> Handle:
    """x + the row of ``table`` of each token's position + ``offset``: fp32 [T, n], in place."""
    x.graph.add("add_positions", x, {"x": x}, offset=offset, **_stored(table))
    return x


def add_token_types(x: Handle, table: npt.NDArray[np.generic]) -> Handle:
    """x + the row of ``table`` of each token's type: fp32 [T, n], in place. Types are 1 for the
    second text of a pair, else 0."""
    x.graph.add("add_token_types", x, {"x": x}, table=table)
    return x


def _stored(table: Table) -> dict[str, object]:
    if isinstance(table, BlockMatrix):
        return {"table": table.blocks, "format": table.format}
    return {"table": table}


def gather_logit_rows(x: Handle) -> Handle:
    """fp32 [T, n] -> fp32 [L, n]: the rows whose logits are wanted."""
    y = x.graph.value("gathered", "fp32", x.columns, "L")
    x.graph.add("gather_logit_rows", y, {"x": x})
    return y
