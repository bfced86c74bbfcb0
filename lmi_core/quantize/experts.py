"""What the experts of a mixture read while it is quantised.

Every expert is measured on the rows of all tokens, not on those alone that the router gives it: a
text has few for some of them, and another text other ones.
"""

from __future__ import annotations

import numpy as np

from lmi_core.models.linears import LayerLinear
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.formats import FloatArray

_MAX_ROWS = 4096
"""That what experts read behind their activation is measured on: each takes three products."""


class KeptRows:
    """Of what a mixture reads, so many rows, at even distances; ``total``: how many come."""

    def __init__(self, total: int) -> None:
        self._step = -(-total // _MAX_ROWS)
        self._num_seen = 0
        self._kept: list[FloatArray] = []

    def observe(self, linear: LayerLinear, rows: FloatArray) -> None:
        """Takes the rows of MLPs alone."""
        if linear is not LayerLinear.GATE_UP:
            return
        self._kept.append(rows[-self._num_seen % self._step :: self._step].copy())
        self._num_seen += len(rows)

    def behind(self, gate: FloatArray, up: FloatArray) -> FloatArray:
        """What an expert's down reads [rows, intermediate]."""
        rows = np.concatenate(self._kept)
        gates = rows @ gate.T
        with np.errstate(over="ignore"):
            silu: FloatArray = gates / (np.float32(1) + np.exp(-gates))
        return silu * (rows @ up.T)


def objection(spec: DecoderSpec) -> str | None:
    """Why a mixture isn't quantised; None: it can be, or there is none."""
    experts = spec.experts
    if experts is None or not any(experts.sparse):
        return None
    if experts.layout != "each":
        return "its experts are in common tensors, which these formats have no linears for"
    if (experts.activation or spec.activation) != "silu" or experts.bias:
        return "experts other than of two SiLU-gated products and a third aren't quantised"
    return None
