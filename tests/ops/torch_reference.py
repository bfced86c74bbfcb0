"""The oracle: every op in plain torch, over a paged cache of its own.

A graph's nodes become closures, which run on steps given as arrays. Dtypes follow the graph:
what it keeps in the act dtype is rounded to it, arithmetic is float32 (float64 with ``fp64``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmi_core.ops.device.adapter_table import AdapterTable
from lmi_core.ops.device.step_arrays import IntArray, StepArrays
from lmi_core.ops.graph import Graph, Handle
from lmi_core.ops.operands import ExpertMatrices, LinearWeight
from lmi_core.weights.formats import FloatArray
from tests.ops.torch_formulas import activated, attend, norm, rms_norm, rotate, routes
from tests.ops.torch_store import DTYPES, TorchKvCache, TorchLinearWeight, tensor_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Per logit row: logits, the sampled id (-1: none), log-probability of it or of the target."""

    logits: npt.NDArray[np.float64]
    sampled_ids: IntArray
    logprobs: npt.NDArray[np.float64]


class _Run:
    """One execution: the step and the value of every handle so far."""

    def __init__(self, step: StepArrays) -> None:
        self.step = step
        self.values: dict[Handle, Tensor] = {}
        self.result: StepResult | None = None


_Compute = Callable[[_Run], Tensor | None]


class TorchGraph:
    """Executes ``graph``, in float64 where its act dtype is fp64. A method per op, of the node's
    result, its operands and attributes, gives what computes the result."""

    def __init__(self, graph: Graph) -> None:
        self._act = DTYPES[graph.act_dtype]
        self._wide = torch.float64 if self._act == torch.float64 else torch.float32
        self._caches: dict[int, TorchKvCache] = {}
        self._nodes = [
            (
                node.result,
                getattr(self, f"_{node.op}")(node.result, **node.operands, **node.attributes),
            )
            for node in graph.nodes
        ]

    def run(self, step: StepArrays) -> StepResult:
        """Execute the recorded ops; ``sample`` must have been recorded."""
        run = _Run(step)
        with torch.no_grad():
            for src, dst in zip(step.copy_src.tolist(), step.copy_dst.tolist(), strict=True):
                for cache in self._caches.values():
                    cache.copy_block(src, dst)
            for result, compute in self._nodes:
                value = compute(run)
                if result is not None:
                    run.values[result] = value
        if run.result is None:
            raise ValueError("the graph has no sample op, so a step has no result")
        return run.result

    def _embed(self, y: Handle, *, table: npt.NDArray[np.generic], scale: float) -> _Compute:
        rows = tensor_of(table)
        return lambda run: rows[_index(run.step.token_ids)].to(self._wide) * scale

    def _add_positions(
        self, y: Handle, x: Handle, *, table: npt.NDArray[np.generic], offset: int
    ) -> _Compute:
        rows = tensor_of(table)
        return lambda run: run.values[x] + rows[_index(run.step.positions) + offset].to(self._wide)

    def _norm(
        self,
        y: Handle,
        x: Handle,
        residual: Handle | None = None,
        *,
        weight: FloatArray | None,
        bias: FloatArray | None,
        eps: float,
        kind: str,
        out_dtype: str,
    ) -> _Compute:
        scale, offset = self._optional(weight), self._optional(bias)

        def compute(run: _Run) -> Tensor:
            result = norm(run.values[x], scale, offset, eps, kind)
            if residual is not None:
                return run.values[residual] + result
            return result.to(self._act if out_dtype == "act" else self._wide)

        return compute

    def _norm_heads(
        self,
        y: Handle,
        x: Handle,
        *,
        weight: FloatArray,
        bias: FloatArray | None,
        eps: float,
        kind: str,
        first_column: int,
        num_groups: int,
    ) -> _Compute:
        scale, offset = self._widen(weight).view(num_groups, -1), self._optional(bias)
        offset = None if offset is None else offset.view(num_groups, -1)
        columns = slice(first_column, first_column + weight.size)

        def compute(run: _Run) -> Tensor:
            result = run.values[x].clone()
            groups = result[:, columns].reshape(len(result), num_groups, -1)
            result[:, columns] = norm(groups, scale, offset, eps, kind).flatten(1)
            return result

        return compute

    def _rms_norm(self, y: Handle, x: Handle, *, weight: FloatArray, eps: float) -> _Compute:
        scale = self._widen(weight)
        return lambda run: rms_norm(run.values[x], scale, eps).to(self._act)

    def _linear(
        self,
        y: Handle,
        x: Handle,
        residual: Handle | None = None,
        *,
        weight: LinearWeight,
        bias: FloatArray | None,
        activation: str,
        out_dtype: str,
        gated: bool = True,
    ) -> _Compute:
        matrix = cast(TorchLinearWeight, weight).matrix.to(self._wide)
        offset = None if bias is None else self._widen(bias)

        def compute(run: _Run) -> Tensor:
            result = torch.nn.functional.linear(run.values[x].to(self._wide), matrix, offset)
            if residual is not None:
                return run.values[residual] + result
            result = activated(result, activation, gated) if activation else result
            return result.to(self._act if activation or out_dtype == "act" else self._wide)

        return compute

    def _gated_activation(self, y: Handle, x: Handle, *, activation: str) -> _Compute:
        return lambda run: activated(run.values[x], activation, True).to(self._act)

    def _activation(self, y: Handle, x: Handle, *, activation: str) -> _Compute:
        return lambda run: activated(run.values[x], activation, False).to(self._act)

    def _soft_cap(self, y: Handle, x: Handle, *, cap: float) -> _Compute:
        return lambda run: cap * torch.tanh(run.values[x] / cap)

    def _clip(self, y: Handle, x: Handle, *, cap: float) -> _Compute:
        return lambda run: run.values[x].clamp(-cap, cap)

    def _route(self, y: Handle, x: Handle, **settings: Any) -> _Compute:
        settings["bias"] = self._optional(settings["bias"])
        return lambda run: routes(run.values[x].to(self._wide), **settings)

    def _grouped_linear(
        self,
        y: Handle,
        x: Handle,
        routes: Handle,
        residual: Handle | None = None,
        *,
        weight: ExpertMatrices,
        bias: FloatArray | None,
        activation: str,
    ) -> _Compute:
        """Rows stay by token, then place among its experts: the order that others sort."""
        experts = [cast(TorchLinearWeight, e).matrix.to(self._wide) for e in _experts_of(weight)]
        biases = None if bias is None else self._widen(bias).view(len(experts), -1)

        def compute(run: _Run) -> Tensor:
            ids, weights = run.values[routes].chunk(2, dim=1)
            top_k = ids.shape[1]
            rows = run.values[x].to(self._wide)
            rows = rows.repeat_interleave(top_k, 0) if x.rows == "T" else rows
            flat = ids.flatten().long().tolist()
            products = [rows[i] @ experts[e].t() for i, e in enumerate(flat)]
            if biases is not None:
                products = [p + biases[e] for p, e in zip(products, flat, strict=True)]
            result = torch.stack(products)
            if residual is not None:
                shares = result.unflatten(0, (-1, top_k)) * weights.unsqueeze(-1)
                return run.values[residual] + shares.sum(1)
            result = activated(result, activation, True) if activation else result
            return result.to(self._act)

        return compute

    def _head_linear(
        self, y: Handle, x: Handle, *, weight: LinearWeight, num_heads: int, out_dtype: str
    ) -> _Compute:
        heads = [cast(TorchLinearWeight, e).matrix.to(self._wide) for e in _experts_of(weight)]

        def compute(run: _Run) -> Tensor:
            columns = run.values[x].to(self._wide).chunk(num_heads, dim=1)
            result = torch.cat([c @ m.t() for c, m in zip(columns, heads, strict=True)], dim=1)
            return result.to(self._act) if out_dtype == "act" else result

        return compute

    def _lora_add(
        self, result: Handle, x: Handle, y: Handle, *, table: AdapterTable, linear_id: int
    ) -> _Compute:
        def compute(run: _Run) -> Tensor:
            sums = run.values[y].clone()
            for part in table.parts(run.step, linear_id):
                z = run.values[x][part.rows].to(self._wide) @ part.a.to(self._wide).t()
                product = z.to(self._act).to(self._wide) @ part.b.to(self._wide).t()
                sums[part.rows, part.outputs] += product
            return sums

        return compute

    def _rope_cache_write(
        self,
        result: Handle,
        qkv: Handle,
        latent: Handle | None = None,
        *,
        cache: TorchKvCache,
        layer: int,
        num_q_heads: int,
        cos: FloatArray,
        sin: FloatArray,
        q_norm: FloatArray | None,
        k_norm: FloatArray | None,
        norm_eps: float,
    ) -> _Compute:
        self._caches[id(cache)] = cache
        num_kv_heads, head_dim = cache.keys.shape[2:]
        cos_table, sin_table = self._widen(cos), self._widen(sin)
        norms = [None if weight is None else self._widen(weight) for weight in (q_norm, k_norm)]

        def compute(run: _Run) -> Tensor:
            rows = run.values[qkv]
            if latent is not None:
                rows = torch.cat((rows, run.values[latent], run.values[latent]), dim=1)
            heads = rows.view(len(run.step.token_ids), -1, head_dim)
            q, k, v = torch.split(heads, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
            if norms[0] is not None:
                q = rms_norm(q, norms[0], norm_eps)
            if norms[1] is not None:
                k = rms_norm(k, norms[1], norm_eps)
            positions, slots = _index(run.step.positions), _index(run.step.slots)
            rotation = cos_table[positions].unsqueeze(1), sin_table[positions].unsqueeze(1)
            k = rotate(k, *rotation)
            cache.write(layer, slots, k, v if latent is None else k)
            return rotate(q, *rotation).flatten(1).to(self._act)

        return compute

    def _attention(
        self,
        result: Handle,
        q: Handle,
        *,
        cache: TorchKvCache,
        layer: int,
        num_q_heads: int,
        slopes: FloatArray | None = None,
        sinks: FloatArray | None = None,
        **settings: Any,
    ) -> _Compute:
        slope = self._optional(slopes)
        settings["sinks"] = self._optional(sinks)

        def compute(run: _Run) -> Tensor:
            queries = run.values[q].to(self._wide)
            queries = queries.view(len(queries), num_q_heads, -1)
            y = torch.empty_like(queries)
            for seq in range(len(run.step.num_rows)):
                first, count = int(run.step.first_rows[seq]), int(run.step.num_rows[seq])
                rows, slots = slice(first, first + count), _slots(run.step, seq, cache.block_size)
                k = cache.keys[layer, slots].to(self._wide)
                v = cache.values[layer, slots].to(self._wide)
                positions = _index(run.step.positions[rows])
                y[rows] = attend(queries[rows], k, v, positions, slopes=slope, **settings)
            return y.flatten(1).to(self._act)

        return compute

    def _gather_logit_rows(self, y: Handle, x: Handle) -> _Compute:
        return lambda run: run.values[x][_index(run.step.logit_token_rows)]

    def _sample(self, _: None, logits: Handle) -> _Compute:
        """Greedy, the lowest id among equals: the distribution is the oracle, not the draw."""

        def compute(run: _Run) -> None:
            values = run.values[logits].to(torch.float64)
            sampled, targets = _index(run.step.sampling_rows) >= 0, _index(run.step.target_ids)
            ids = torch.where(sampled, values.argmax(-1), torch.tensor(-1))
            wanted = torch.where(targets >= 0, targets, ids)
            logprobs = values.log_softmax(-1).gather(1, wanted.clamp(min=0).unsqueeze(1)).squeeze(1)
            run.result = StepResult(
                logits=values.numpy(),
                sampled_ids=ids.to(torch.int32).numpy(),
                logprobs=logprobs.numpy(),
            )

        return compute

    def _optional(self, values: FloatArray | None) -> Tensor | None:
        return None if values is None else self._widen(values)

    def _widen(self, values: FloatArray) -> Tensor:
        return torch.from_numpy(values.copy()).to(self._wide)


def _index(values: IntArray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _slots(step: StepArrays, seq: int, block_size: int) -> Tensor:
    """Cache slots of a sequence's positions in order."""
    positions = np.arange(step.kv_lengths[seq])
    blocks = step.block_tables[step.table_rows[seq], positions // block_size]
    return torch.from_numpy(blocks.astype(np.int64) * block_size + positions % block_size)


def _experts_of(weight: LinearWeight | ExpertMatrices) -> Sequence[LinearWeight]:
    return weight.experts if isinstance(weight, ExpertMatrices) else [weight]
