"""Rows that are kept by slot, from step to step, and columns of a smaller vocabulary."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lmi_core.ops.graph import Graph, Handle


class StatesTable(Protocol):
    """An array [slots, n] on the CPU, fp32, or bf16 as uint16; a device's own elsewhere."""

    @property
    def shape(self) -> Any: ...


def kept_rows(graph: Graph, table: StatesTable) -> Handle:
    """Rows of ``table`` [slots, n] (fp32, or bf16 as uint16) by the slots of the step's tokens ->
    fp32 [T, n]."""
    x = graph.value("kept", "fp32", table.shape[1], "T")
    return graph.add("kept_rows", x, {}, table=table)


def keep_rows(x: Handle, table: StatesTable) -> None:
    """Keeps fp32 [T, n] in the rows of their slots, of a ``table`` of the act dtype; [L, n] in
    those of the positions behind theirs. Blocks that the step copies are copied there, too."""
    rows = Handle(x.graph, f"{x.name}_kept", x.graph.act_dtype, x.columns, x.rows)
    settings = {"weight": None, "bias": None, "eps": 0.0, "kind": "none", "out_dtype": "act"}
    x.graph.add("norm", rows, {"x": x}, **settings)
    x.graph.add("keep_rows", None, {"x": rows}, table=table)


def spread_columns(x: Handle, columns: npt.NDArray[np.int32], num_columns: int) -> Handle:
    """Logits of ``columns``, ascending, of a vocabulary of ``num_columns``, of which the others are
    as unlikely as what is banned: fp32 [R, k] -> [R, num_columns]."""
    y = x.graph.value("spread", "fp32", num_columns, x.rows)
    return x.graph.add("spread_columns", y, {"x": x}, columns=columns, num_columns=num_columns)
