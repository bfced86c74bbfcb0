"""The oracle: every op in plain torch, over a paged cache of its own.

A graph's nodes become closures, which run on steps given as arrays. Dtypes follow the graph:
what it keeps in the act dtype is rounded to it, arithmetic is float32 (float64 with ``fp64``).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmi_core.ops.device.adapter_table import AdapterTable
from lmi_core.ops.device.step_arrays import IntArray, StepArrays
from lmi_core.ops.graph import ExpertMatrices, Graph, Handle, LinearWeight
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.matrix import Matrix, dense

DTypeName = Literal["fp32", "bf16", "fp64"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Per logit row: logits, the sampled id (-1: none), log-probability of it or of the target."""

    logits: npt.NDArray[np.float64]
    sampled_ids: IntArray
    logprobs: npt.NDArray[np.float64]


class TorchMappedFile:
    """A read-only mapping of a file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @property
    def is_lost(self) -> bool:
        return False

    def array(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._map, np.uint8, num_bytes, offset)

    def drop(self, offset: int, num_bytes: int) -> None:
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, offset + num_bytes - start)


class TorchLinearWeight:
    """Matrix [num_outputs, num_inputs]; a gated one holds gate above up."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.num_outputs, self.num_inputs = matrix.shape
        self.num_bytes = matrix.numel() * matrix.element_size()
        self.row_format = None


class TorchWeights:
    """Maps files and holds matrices as tensors."""

    @property
    def keeps_blocks(self) -> bool:
        return False

    def keeps_fp8(self, parts: Sequence[Matrix]) -> bool:
        return False

    def open(self, path: Path) -> TorchMappedFile:
        return TorchMappedFile(path)

    def pack(
        self,
        parts: Sequence[Matrix],
        *,
        names: Sequence[str] = (),
        format: Literal["fp32", "bf16", "int8", "int4", "fp8"],
        gated: bool,
    ) -> TorchLinearWeight:
        if format not in _DTYPES:
            raise ValueError(f"the reference has fp32 and bf16 weights, not {format}")
        matrix = torch.cat([_tensor(part) for part in dense(parts)])
        return TorchLinearWeight(matrix.to(_DTYPES[format]))

    def pack_experts(self, experts: Sequence[Sequence[Matrix]], **settings: Any) -> ExpertMatrices:
        return ExpertMatrices(tuple(self.pack(parts, **settings) for parts in experts))


class TorchKvCache:
    """Keys and values, each [layers, slots, kv heads, head_dim]."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeName | Literal["int8"],
    ) -> None:
        shape = (num_layers, num_blocks * block_size, num_kv_heads, head_dim)
        self.block_size, self.head_dim = block_size, head_dim
        # NaN shows a read of what was never written. int8 keeps what the codes stand for.
        self.is_int8 = dtype == "int8"
        stored = torch.float32 if dtype == "int8" else _DTYPES[dtype]
        self.keys = torch.full(shape, torch.nan, dtype=stored)
        self.values = self.keys.clone()

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Keys and values [slots, kv heads, head_dim]."""
        for store, rows in ((self.keys, keys), (self.values, values)):
            store[layer, slots] = (_through_int8(rows) if self.is_int8 else rows).to(store.dtype)

    def copy_block(self, src: int, dst: int) -> None:
        size = self.block_size
        for store in (self.keys, self.values):
            store[:, dst * size : (dst + 1) * size] = store[:, src * size : (src + 1) * size]


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
        self._act = _DTYPES[graph.act_dtype]
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
        rows = _tensor(table)
        return lambda run: rows[_index(run.step.token_ids)].to(self._wide) * scale

    def _add_positions(
        self, y: Handle, x: Handle, *, table: npt.NDArray[np.generic], offset: int
    ) -> _Compute:
        rows = _tensor(table)
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
            result = _norm(run.values[x], scale, offset, eps, kind)
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
            result[:, columns] = _norm(groups, scale, offset, eps, kind).flatten(1)
            return result

        return compute

    def _rms_norm(self, y: Handle, x: Handle, *, weight: FloatArray, eps: float) -> _Compute:
        scale = self._widen(weight)
        return lambda run: _rms_norm(run.values[x], scale, eps).to(self._act)

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
            result = _activated(result, activation, gated) if activation else result
            return result.to(self._act if activation or out_dtype == "act" else self._wide)

        return compute

    def _gated_activation(self, y: Handle, x: Handle, *, activation: str) -> _Compute:
        return lambda run: _activated(run.values[x], activation, True).to(self._act)

    def _activation(self, y: Handle, x: Handle, *, activation: str) -> _Compute:
        return lambda run: _activated(run.values[x], activation, False).to(self._act)

    def _soft_cap(self, y: Handle, x: Handle, *, cap: float) -> _Compute:
        return lambda run: cap * torch.tanh(run.values[x] / cap)

    def _clip(self, y: Handle, x: Handle, *, cap: float) -> _Compute:
        return lambda run: run.values[x].clamp(-cap, cap)

    def _route(self, y: Handle, x: Handle, **settings: Any) -> _Compute:
        settings["bias"] = self._optional(settings["bias"])
        return lambda run: _routes(run.values[x].to(self._wide), **settings)

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
            result = _activated(result, activation, True) if activation else result
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
                q = _rms_norm(q, norms[0], norm_eps)
            if norms[1] is not None:
                k = _rms_norm(k, norms[1], norm_eps)
            positions, slots = _index(run.step.positions), _index(run.step.slots)
            rotation = cos_table[positions].unsqueeze(1), sin_table[positions].unsqueeze(1)
            cache.write(layer, slots, _rotate(k, *rotation), v)
            return _rotate(q, *rotation).flatten(1).to(self._act)

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
                y[rows] = _attend(queries[rows], k, v, positions, slopes=slope, **settings)
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


def _tensor(values: npt.NDArray[np.generic]) -> Tensor:
    """A tensor of an array as stored, bf16 from uint16; copied: mapped files are read-only."""
    tensor = torch.from_numpy(np.array(values))
    return tensor.view(torch.bfloat16) if values.dtype == np.uint16 else tensor


def _index(values: IntArray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _slots(step: StepArrays, seq: int, block_size: int) -> Tensor:
    """Cache slots of a sequence's positions in order."""
    positions = np.arange(step.kv_lengths[seq])
    blocks = step.block_tables[step.table_rows[seq], positions // block_size]
    return torch.from_numpy(blocks.astype(np.int64) * block_size + positions % block_size)


def _through_int8(x: Tensor) -> Tensor:
    """The nearest multiples of a scale per row, the largest value's 127th part."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round() * scale, 0.0)


def _experts_of(weight: LinearWeight | ExpertMatrices) -> Sequence[LinearWeight]:
    return weight.experts if isinstance(weight, ExpertMatrices) else [weight]


def _routes(
    logits: Tensor,
    *,
    top_k: int,
    scoring: str,
    bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    group_best: int,
    normalizes: bool,
    scale: float,
    threshold: float,
) -> Tensor:
    """Row by row, as the definitions have it."""
    rows = []
    for row in logits:
        if scoring == "sparsemixer":
            chosen = _sparse_mixture(row.tolist(), top_k, threshold)
        else:
            scores = row.softmax(-1) if scoring == "softmax" else row.sigmoid()
            chances = scores if bias is None else scores + bias
            groups = [
                sorted(group, reverse=True) for group in chances.view(num_groups, -1).tolist()
            ]
            order = sorted(range(num_groups), key=lambda g: -sum(groups[g][:group_best]))
            size = len(chances) // num_groups
            ids = [i for i in range(len(chances)) if i // size in order[:top_groups]]
            best = sorted(ids, key=lambda i: -chances[i].item())[:top_k]
            chosen = {i: scores[i].item() for i in best}
        total = sum(chosen.values()) if normalizes else 1.0
        ids = sorted(chosen)
        rows.append([*map(float, ids), *(chosen[i] / total * scale for i in ids)])
    return torch.tensor(rows, dtype=logits.dtype)


def _sparse_mixture(logits: list[float], top_k: int, threshold: float) -> dict[int, float]:
    chosen: dict[int, float] = {}
    for _ in range(top_k):
        left = [i for i in range(len(logits)) if i not in chosen]
        best = max(left, key=lambda i: logits[i])
        most = logits[best]
        near = [i for i in left if (most - logits[i]) / max(abs(logits[i]), most) <= threshold]
        chosen[best] = 1.0 / sum(np.exp(logits[i] - most) for i in near)
    return chosen


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def _norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    if kind == "layer":
        x = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)
    elif kind == "rms":
        x = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=eps)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _activated(x: Tensor, activation: str, gated: bool) -> Tensor:
    function = torch.nn.functional
    x, up = x.chunk(2, dim=-1) if gated else (x, None)
    if activation == "silu":
        y = function.silu(x)
    elif activation == "clamped_swiglu":
        assert up is not None
        x, up = x.clamp(max=7.0), up.clamp(-7.0, 7.0) + 1.0
        y = x * torch.sigmoid(1.702 * x)
    elif activation.startswith("gelu"):
        y = function.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    else:
        y = function.relu(x) ** (2 if activation == "relu2" else 1)
    return y if up is None else y * up


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [rows, hq, d] at ``positions`` over k, v [kv length, hkv, d] -> [rows, hq, d]."""
    num_groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(num_groups, dim=1), v.repeat_interleave(num_groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = positions.unsqueeze(1) - torch.arange(k.shape[0])
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance
    hidden = distance < 0
    if window:
        hidden |= distance >= window
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks[:, None, None].exp()
    weights = weights / total
    return torch.einsum("hqk,khd->qhd", weights, v)
