"""Nodes of a step list that take rows on their own: norms, activations, sums."""

from __future__ import annotations

import torch
from torch import Tensor

from lmi_core.ops.device.product_lowering import NotNativeError, ProductLowering
from lmi_core.ops.device.recorded_steps import Value
from lmi_core.ops.graph import Handle
from lmi_core.ops.kernels.cuda.activation import ACTIVATIONS, CODED_ACTIVATIONS, can_quantize
from lmi_core.ops.kernels.cuda.norm import KINDS, most_columns


class RowLowering(ProductLowering):
    """And sums that are left to the next norm."""

    def _activate(self, y: Handle, x: Value, activation: str, *, is_gated: bool) -> None:
        self._want_native("gated_activation" if is_gated else "activation")
        if not is_gated or activation not in CODED_ACTIVATIONS:
            self._activation_node(activation, x, self._new(y), is_gated=is_gated)
            return
        self._node(
            "gated_activation",
            y.rows,
            gate_up=x,
            x_dtype=x.dtype,
            num_columns=y.columns,
            activation=ACTIVATIONS[activation],
            y_dtype=self._act,
            **self._result(y, is_quantizable=can_quantize(y.columns)),
        )

    def _activation_node(self, name: str, x: Value, y: Value, **settings: object) -> None:
        self._node(
            "activation",
            y.rows,
            x=x,
            x_dtype=x.dtype,
            y=y,
            num_columns=y.columns,
            activation=ACTIVATIONS[name],
            y_dtype=y.dtype,
            **settings,
        )

    def _norm_node(
        self,
        x: Value,
        weight: Tensor | None,
        bias: Tensor | None,
        *,
        y: Value | None = None,
        addend: Value | None = None,
        kind: str = "none",
        eps: float = 0.0,
    ) -> None:
        """Of whole rows. ``y`` None: the sum with the addend alone."""
        self._node(
            "norm",
            x.rows,
            x=x,
            addend=addend,
            weight=weight,
            bias=bias,
            y=y,
            num_groups=1,
            num_columns=x.columns,
            stride=x.columns,
            kind=KINDS[kind],
            eps=eps,
            y_dtype=torch.float32 if y is None else y.dtype,
        )

    def _add_later(self, target: Value, addend: Value) -> None:
        self._settle(target)
        self._addends[target] = addend

    def _settle(self, value: Value) -> None:
        """Add what is yet to be added to it."""
        addend = self._addends.pop(value, None)
        if addend is not None:
            self._want_normed("norm", value.columns)
            self._norm_node(value, None, None, addend=addend)

    def _want_normed(self, op: str, num_columns: int) -> None:
        self._want_native(op)
        if num_columns > most_columns(num_columns):
            raise NotNativeError(op, f"the CUDA kernel has no rows of {num_columns} columns")
