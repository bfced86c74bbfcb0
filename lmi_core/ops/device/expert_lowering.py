"""Experts of a step list: routing, rows by expert, their products and sums; heads' products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from lmi_core.ops.device.expert_rows import ExpertTable
from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.device.product_lowering import NotNativeError
from lmi_core.ops.device.recorded_steps import OneRow, Value
from lmi_core.ops.device.row_lowering import RowLowering
from lmi_core.ops.device.torch_weights import DeviceWeight
from lmi_core.ops.graph import Handle
from lmi_core.ops.kernels.cuda.experts import (
    SCORINGS,
    heads_not_covered,
    not_covered,
    routing_not_covered,
)
from lmi_core.ops.operands import ExpertMatrices, LinearWeight


class ExpertLowering(RowLowering):
    """Kernels for mixtures of experts, whose rows all have as many."""

    experts_per_token = 0
    """0: no experts so far."""

    def _route(
        self, y: Handle, x: Handle, *, scoring: str, normalizes: bool, **settings: Any
    ) -> None:
        self._want_native("route")
        reason = routing_not_covered(x.columns, settings["num_groups"])
        if reason:
            raise NotNativeError("route", f"the CUDA kernel has no {reason}")
        self._node(
            "route",
            x.rows,
            logits=self._of_handles[x],
            y=self._new(y),
            num_experts=x.columns,
            scoring=SCORINGS[scoring],
            normalizes=normalizes,
            **settings,
        )

    def _grouped_linear(
        self,
        y: Handle,
        x: Handle,
        routes: Handle,
        residual: Handle | None = None,
        *,
        weight: LinearWeight,
        bias: Tensor | None,
        activation: str,
    ) -> None:
        product, places = self._routed(x, routes, weight, bias)
        if residual is not None:
            sums = self._of_handles[residual]
            self._settle(sums)
            self._add_experts(product, routes, places, sums)
            return
        own = y
        if places is None:
            own = self._shared[y] = replace(y, rows=product.rows)
        if activation:
            self._activate(own, product, activation, is_gated=True)
        else:
            self._want_normed("norm", y.columns)
            self._norm_node(product, None, None, y=self._new(own))

    def _routed(
        self, x: Handle, routes: Handle, weight: LinearWeight, bias: Tensor | None
    ) -> tuple[Value, Value | None]:
        """Of each row and each of its experts, and where; None: of one that every row takes."""
        x = self._shared.get(x, x)
        if isinstance(weight, ExpertMatrices):
            return self._expert_product(x, routes, weight, bias)
        return self._product(x, weight, bias), None

    def _add_experts(
        self,
        product: Value,
        routes: Handle,
        places: Value | None,
        sums: Value,
        *,
        adds: bool = True,
    ) -> None:
        """To ``sums``, or as what they are."""
        self._node(
            "add_experts",
            "T",
            y=product,
            routes=self._of_handles[routes],
            places=places,
            sums=sums,
            num_columns=product.columns,
            top_k=routes.columns // 2,
            adds=adds,
        )

    def _expert_product(
        self, x: Handle, routes: Handle, weight: ExpertMatrices, bias: Tensor | None
    ) -> tuple[Value, Value]:
        """And the row of each of a token's experts."""
        self._want_native("grouped_linear")
        table = ExpertTable(weight.experts, _multiplied_together)
        reason = not_covered(self._act, table)
        if reason:
            raise NotNativeError("grouped_linear", f"the CUDA kernel has no {reason}")
        token_rows, places, first_rows = self._group(routes, len(weight.experts))
        lists = {
            "matrices": lambda: table.addresses,  # the table keeps their matrices
            "first_rows": first_rows,
            "token_rows": token_rows if x.rows == "T" else None,
            "num_experts": len(weight.experts),
        }
        expert = weight.experts[0]
        y = self._value(torch.float32, expert.num_outputs, "E")
        if not isinstance(expert, PackedWeight):
            self._dense_experts(self._of_handles[x], cast(DeviceWeight, expert), bias, y, lists)
        elif expert.row_format:
            self._quantized_product(x, expert, expert.row_format, bias, y, lists)
        else:
            self._packed_product(self._of_handles[x], expert, bias, y, lists)
        return y, places

    def _dense_experts(
        self,
        x: Value,
        weight: DeviceWeight,
        bias: Tensor | None,
        y: Value,
        lists: dict[str, Any],
    ) -> None:
        self._node(
            "linear_experts",
            "E",
            x=x,
            bias=bias,
            y=y,
            num_outputs=weight.num_outputs,
            num_inputs=weight.num_inputs,
            dtype=x.dtype,
            **lists,
        )

    def _head_linear(
        self, y: Handle, x: Handle, *, weight: LinearWeight, num_heads: int, out_dtype: str
    ) -> None:
        self._want_native("head_linear")
        assert isinstance(weight, ExpertMatrices)
        table = ExpertTable(weight.experts, _multiplied_together)
        reason = heads_not_covered(self._act, table)
        if reason:
            raise NotNativeError("head_linear", f"the CUDA kernel has no {reason}")
        result = self._new(y)
        self._node(
            "head_linear",
            x.rows,
            x=self._of_handles[x],
            y=result,
            matrices=lambda: table.addresses,  # the table keeps their matrices
            num_heads=num_heads,
            num_outputs=weight.num_outputs,
            num_inputs=weight.num_inputs,
            dtype=self._act,
            y_dtype=result.dtype,
        )

    def _group(self, routes: Handle, num_experts: int) -> tuple[Value, Value, Value]:
        """Tokens of rows, rows of tokens' experts, experts' first rows; once for all products."""
        top_k = routes.columns // 2
        if routes in self._grouped:
            return self._grouped[routes]
        self._want_native("group_rows")
        if self.experts_per_token not in (0, top_k):
            reason = f"rows with {self.experts_per_token} experts, others with {top_k}"
            raise NotNativeError("grouped_linear", f"step lists have no {reason}")
        self.experts_per_token = top_k
        token_rows, places = (self._value(torch.int32, top_k, "T") for _ in range(2))
        node_id = len(self.nodes)
        first_rows = OneRow(torch.int32, num_experts + 1, "T", node_id, node_id)
        self._values.append(first_rows)
        self._node(
            "group_rows",
            "T",
            routes=self._of_handles[routes],
            token_rows=token_rows,
            places=places,
            first_rows=first_rows,
            num_experts=num_experts,
            top_k=top_k,
        )
        self._grouped[routes] = token_rows, places, first_rows
        return self._grouped[routes]


def _multiplied_together(expert: int, rows: Tensor, bias: Tensor | None) -> Tensor:
    raise AssertionError(f"expert {expert} was multiplied on its own")
