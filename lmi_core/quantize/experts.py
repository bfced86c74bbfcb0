"""What the experts of a mixture read while it is quantised.

Every expert is measured on the rows of all tokens, not on those alone that the router gives it: a
text has few for some of them, and another text other ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmi_core.models.expert_tensors import EACH
from lmi_core.models.spec import Activation, DecoderSpec, LayerLinear
from lmi_core.quantize.expert_slices import COMMON, own_form
from lmi_core.weights.formats import FloatArray

_MAX_ROWS = 4096
"""That what experts read behind their activation is measured on: each takes three products."""
_MOST, _SLOPE = 7.0, 1.702
"""Of clamped_swiglu."""


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

    def behind(
        self,
        ups: Sequence[FloatArray],
        biases: Sequence[FloatArray] = (),
        activation: Activation = "silu",
    ) -> FloatArray:
        """What an expert's down reads [rows, intermediate]. ``ups``: gate and up, or both in turns,
        whose ``biases`` these are."""
        rows = np.concatenate(self._kept)
        made = [rows @ matrix.T for matrix in ups]
        made = [each + bias for each, bias in zip(made, biases, strict=True)] if biases else made
        gates, values = made if len(made) == 2 else (made[0][:, ::2], made[0][:, 1::2])
        slope = np.float32(1)
        if activation == "clamped_swiglu":
            slope = np.float32(_SLOPE)
            gates, values = np.minimum(gates, _MOST), np.clip(values, -_MOST, _MOST) + np.float32(1)
        with np.errstate(over="ignore"):
            read: FloatArray = gates / (np.float32(1) + np.exp(-slope * gates)) * values
        return read


def objection(spec: DecoderSpec, format: str, *, is_gguf: bool) -> str | None:
    """Why a mixture isn't written in ``format``; None: it can be, or there is none."""
    experts = spec.experts
    if experts is None or not any(experts.sparse):
        return None
    activation = experts.activation or spec.activation
    if experts.layout in COMMON and own_form(experts, is_gguf=is_gguf) is None:
        return (
            "its experts are in common tensors, and no linears of each expert are known of its "
            "family, which this format would need: write GGUF, which has common tensors itself"
        )
    if experts.layout not in (*COMMON, *EACH):
        return f"its experts' tensors ({experts.layout}) are in a format already"
    if activation not in ("silu", "clamped_swiglu"):
        return f"experts with {activation} between their products aren't quantised"
    if format == "awq" and activation != "silu":
        return "what its experts' downs read can't be divided by AWQ's factors: write gptq"
    return None
