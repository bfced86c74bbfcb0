"""A step graph as torch calls of one of several ranks, which meet to add up what each has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lmi_core.ops.device.adapter_table import AdapterTable
from lmi_core.ops.device.eager import Compute, EagerGraph
from lmi_core.ops.device.replay import Replay
from lmi_core.ops.graph import Graph, Handle
from lmi_core.ops.kernels.select import Kernels
from lmi_core.ops.operands import ExpertMatrices, LinearWeight, SlicedWeight


class Ranks(Protocol):
    """The ranks of a model, as one of them meets the others: all call the same, in one order."""

    def gather(self, part: Tensor) -> list[Tensor]:
        """Every rank's, all of one shape, by rank."""
        ...

    def collect(self, x: Tensor) -> None:
        """Add the others to rank 0's, where at most one rank has another number than 0 each."""
        ...


class RankedGraph(EagerGraph):
    """``graph`` of one rank. Sums go in the order of ranks, so that bits depend neither on timing
    nor on how many rows there are."""

    def __init__(self, graph: Graph, kernels: Kernels, device: torch.device, ranks: Ranks) -> None:
        self._ranks = ranks
        super().__init__(graph, kernels, device)

    def _sum(self, part: Tensor, bias: Tensor | None = None) -> Tensor:
        """``bias``: rank 0's product has it, as in a step list (``RankLowering``)."""
        first, *others = self._ranks.gather(part)
        if bias is not None:
            first = first + bias
        for other in others:
            first = first + other
        return first

    def _summed_linear(
        self,
        y: Handle,
        x: Handle,
        residual: Handle | None = None,
        *,
        slices: SlicedWeight,
        bias: Tensor | None,
        table: AdapterTable | None = None,
        linear_ids: tuple[int, ...] = (),
    ) -> Compute:
        [weight] = slices.slices
        multiply = self._multiply(weight)

        def summed(replay: Replay) -> Tensor:
            own = multiply(replay[x], None).float()
            if table is not None:
                [linear_id] = linear_ids
                own = self._adapted(replay, x, own, table, linear_id)
            return self._sum(own, bias)

        return self._added(y, summed, residual)

    def _summed_experts(
        self,
        y: Handle,
        x: Handle,
        routes: Handle,
        residual: Handle,
        *,
        slices: SlicedWeight,
        bias: Tensor | None,
    ) -> Compute:
        [weight] = slices.slices
        if not isinstance(weight, ExpertMatrices):  # a shared one, which every row takes
            multiply = self._multiply(weight)
            return self._added(
                y,
                lambda replay: self._sum(multiply(replay[x], bias) * replay[routes][:, 1:]),
                residual,
            )
        table = self._expert_table(weight)
        biases = None if bias is None else bias.view(len(table.experts), -1)

        def summed(replay: Replay) -> Tensor:
            routed, sums = replay[routes], torch.zeros_like(replay[residual])
            rows = replay.grouped(routes)
            if rows is None:
                rows = replay.group(routes, self.kernels.group_rows(routed, len(table.experts)))
            self.kernels.grouped_linear(
                *(replay[x], routed, rows, table, biases), is_by_token=x.rows == "T", sums=sums
            )
            return self._sum(sums)

        return self._added(y, summed, residual)

    def _added(
        self, y: Handle, summed: Callable[[Replay], Tensor], residual: Handle | None
    ) -> Compute:
        def add(replay: Replay) -> None:
            replay.add_later(y, summed(replay))

        return summed if residual is None else add

    def _gathered_linear(
        self, y: Handle, x: Handle, *, weight: LinearWeight, bias: Tensor | None, first_column: int
    ) -> Compute:
        multiply = self._multiply(weight)
        columns = slice(first_column, first_column + weight.num_outputs)

        def compute(replay: Replay) -> Tensor:
            own = multiply(replay.operand(x), bias)
            logits = own.new_zeros(len(own), y.columns, dtype=torch.float32)
            logits[:, columns] = own
            self._ranks.collect(logits)
            return logits

        return compute

    def _norm_all_heads(
        self,
        y: Handle,
        qkv: Handle,
        *,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        head_dim: int,
        num_alike: int,
    ) -> Compute:
        num_q = q_weight.numel()
        parts = ((0, q_weight, 1), (num_q, k_weight, num_alike))
        num_normed = num_q + k_weight.numel()

        def compute(replay: Replay) -> Tensor:
            value = replay[qkv]
            heads = value[:, :num_normed].reshape(len(value), -1, head_dim)
            squares = self._ranks.gather(heads.square().mean(2))
            for first, weight, step in parts:
                own = slice(first // head_dim, (first + weight.numel()) // head_dim)
                mean = torch.cat([of_rank[:, own] for of_rank in squares[::step]], 1).mean(1)
                columns = slice(first, first + weight.numel())
                value[:, columns] *= torch.rsqrt(mean + eps).unsqueeze(1) * weight
            return value

        return compute
