"""The step graph of one of several ranks as a step list: what ranks sum and hand one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from lmi_core.ops.device.adapter_table import AdapterTable
from lmi_core.ops.device.product_lowering import NotNativeError
from lmi_core.ops.device.step_lowering import StepLowering
from lmi_core.ops.graph import Graph, Handle
from lmi_core.ops.operands import LinearWeight, SlicedWeight


class RankLowering(StepLowering):
    """``graph`` of rank ``rank``, of which each has the logits from its place in ``first_columns``
    on, up to the next one's. A bias is rank 0's: its product has it before ranks add theirs."""

    def __init__(
        self,
        graph: Graph,
        chosen: Mapping[str, str],
        device: torch.device,
        rank: int,
        first_columns: Sequence[int],
    ) -> None:
        self._rank = rank
        self._first_columns = torch.tensor(first_columns, dtype=torch.int32, device=device)
        self._most_columns = max(end - first for first, end in pairwise(first_columns))
        super().__init__(graph, chosen, device)

    def _summed_linear(
        self,
        y: Handle,
        x: Handle,
        residual: Handle | None = None,
        *,
        slices: SlicedWeight,
        bias: Tensor | None,
        table: AdapterTable | None = None,
        linear_ids: Sequence[int] = (),
    ) -> None:
        if table is not None:
            raise NotNativeError("summed_linear", "adapters of ranks are launched there")
        [weight] = slices.slices
        product = self._product(x, weight, bias if self._rank == 0 else None)
        self._node("all_reduce", x.rows, x=product, num_columns=product.columns)
        if residual is not None:
            self._add_later(self._of_handles[residual], product)
        else:
            self._of_handles[y] = product

    def _summed_experts(
        self,
        y: Handle,
        x: Handle,
        routes: Handle,
        residual: Handle,
        *,
        slices: SlicedWeight,
        bias: Tensor | None,
    ) -> None:
        [weight] = slices.slices
        product, places = self._routed(x, routes, weight, bias)
        sums = self._value(torch.float32, y.columns, "T")
        self._add_experts(product, routes, places, sums, adds=False)
        self._node("all_reduce", "T", x=sums, num_columns=y.columns)
        self._add_later(self._of_handles[residual], sums)

    def _norm_all_heads(
        self,
        y: Handle,
        qkv: Handle,
        *,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        **_: int,
    ) -> None:
        self._want_native("norm_heads")
        means = self._value(torch.float32, 2, qkv.rows)
        shared: dict[str, object] = {
            "x": self._of_handles[qkv],
            "means": means,
            "stride": qkv.columns,
            "num_q": q_weight.numel(),
            "num_k": k_weight.numel(),
        }
        self._node("square_heads", qkv.rows, num_ranks=len(self._first_columns) - 1, **shared)
        self._node("all_reduce", qkv.rows, x=means, num_columns=means.columns)
        weight = torch.cat([q_weight, k_weight])
        self._node("scale_heads", qkv.rows, weight=weight, eps=eps, **shared)

    def _gathered_linear(
        self, y: Handle, x: Handle, *, weight: LinearWeight, bias: Tensor | None, first_column: int
    ) -> None:
        own = self._product(x, weight, bias)
        own.columns = self._most_columns  # all ranks send as much
        num_ranks = len(self._first_columns) - 1
        parts = self._value(torch.float32, num_ranks * self._most_columns, x.rows)
        self._logits = own
        logits = {} if self._rank > 0 else {"y": self._new(y)}
        self._node(
            "gather_columns",
            x.rows,
            x=own,
            parts=parts,
            first_columns=self._first_columns,
            num_columns=y.columns,
            most_columns=self._most_columns,
            **logits,
        )

    def _meet(self, _: None, x: Handle) -> None:
        self._node("share_tokens", "L")
