"""A step graph as torch calls: closures over tensors, called one after the other for every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor

from lmi_core.errors import ModelError
from lmi_core.ops.device.adapter_table import AdapterTable
from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.expert_rows import ExpertTable
from lmi_core.ops.device.kept_nodes import KeptNodes
from lmi_core.ops.device.kept_table import KeptTable
from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.device.paged_cache import PagedCache
from lmi_core.ops.device.pending_results import PendingResults
from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.device.replay import Replay
from lmi_core.ops.device.sampling_inputs import SamplingInputs
from lmi_core.ops.device.torch_weights import DTYPES, DeviceConstants, DeviceWeight
from lmi_core.ops.device.value_uses import last_uses, narrow_products
from lmi_core.ops.graph import Graph, Handle, Node, quantized_rows
from lmi_core.ops.kernels.select import Kernels
from lmi_core.ops.operands import ExpertMatrices, LinearWeight

_RESULTS = ("sample", "output", "meet")
"""Ops that compute nothing here: their operands are what a graph gives, in this order."""
Compute = Callable[[Replay], "Tensor | QuantizedRows | None"]
"""None: of a node that adds to an operand."""


class EagerGraph(KeptNodes):
    """``graph`` as calls of ``kernels`` on ``device``. A method per op, of the node's result, its
    operands and attributes, with arrays as tensors, gives what computes the result."""

    def __init__(self, graph: Graph, kernels: Kernels, device: torch.device) -> None:
        self.kernels = kernels
        self.device = device
        self.act_dtype = graph.act_dtype
        self._act = DTYPES[graph.act_dtype]
        self._caches: list[PagedCache | KeptTable] = []
        results = [node for node in graph.nodes if node.op in _RESULTS]
        results.sort(key=lambda node: _RESULTS.index(node.op))
        self._results = [next(iter(node.operands.values())) for node in results]
        self._sees_later = any(node.attributes.get("sees_later") for node in graph.nodes)
        groups_in_torch = kernels.chosen["grouped_linear"] in ("torch", "by row")
        self.reads_counts = groups_in_torch and any(
            node.op == "grouped_linear" and isinstance(node.attributes["weight"], ExpertMatrices)
            for node in graph.nodes
        )
        """Whether the host waits within a step, for how many rows experts have."""
        self._quantized = quantized_rows(graph)
        self._narrow = narrow_products(graph)
        self._unpacked_bytes = 0
        constants = DeviceConstants(device)
        self._nodes = [
            (node.result, self._lowered(node, constants), freed)
            for node, freed in zip(graph.nodes, last_uses(graph), strict=True)
            if node.op not in _RESULTS
        ]
        room = torch.empty(self._unpacked_bytes, dtype=torch.uint8, device=device)
        self._unpacked = room if self._unpacked_bytes else None

    @torch.inference_mode()
    def forward(self, step: DeviceStep) -> Tensor:
        """Execute what was recorded, up to the logits that are sampled, or the output."""
        return self.forward_all(step)[0]

    @torch.inference_mode()
    def forward_all(self, step: DeviceStep) -> list[Tensor]:
        """The same, and outputs of token rows that were recorded beside what is sampled."""
        if not self._results:
            raise ValueError("the graph has no sample and no output, so a step has no result")
        if len(step.copy_src):
            for cache in self._caches:
                cache.copy_blocks(step.copy_src, step.copy_dst)
        if not self.kernels.is_row_by_row:
            return self._execute(step)
        if self._sees_later:
            return [torch.cat([self._execute(sequence)[0] for sequence in step.sequences()])]
        first, *others = zip(*(self._execute(row) for row in step.single_rows()), strict=True)
        logits = torch.cat([first[row] for row in step.host.logit_token_rows] or first)
        return [logits, *map(torch.cat, others)]

    def _execute(self, step: DeviceStep) -> list[Tensor]:
        replay = Replay(step)
        for result, compute, freed in self._nodes:
            value = compute(replay)
            if value is not None:
                assert result is not None
                replay[result] = value
            for handle in freed:
                replay.drop(handle)
        return [replay[result] for result in self._results]

    @torch.inference_mode()
    def choose(self, logits: Tensor, sampling: SamplingInputs) -> PendingResults:
        """Execute ``sample``."""
        return cast(PendingResults, self.kernels.sample(logits, sampling))

    def _lowered(self, node: Node, constants: DeviceConstants) -> Compute:
        attributes = {
            name: constants.put(value) if isinstance(value, np.ndarray) else value
            for name, value in node.attributes.items()
        }
        lower = getattr(self, f"_{node.op}", None)
        if lower is None:
            raise ModelError(f"torch devices have no op {node.op}, which the model needs")
        return cast(Compute, lower(node.result, **node.operands, **attributes))

    def _embed(self, y: Handle, *, table: Tensor, scale: float) -> Compute:
        def compute(replay: Replay) -> Tensor:
            x = table[replay.step.token_ids].float()
            return x if scale == 1.0 else x.mul_(scale)

        return compute

    def _add_positions(self, y: Handle, x: Handle, *, table: Tensor, offset: int) -> Compute:
        def add(replay: Replay) -> None:
            replay.add_later(y, table[replay.step.positions + offset].float())

        return add

    def _add_token_types(self, y: Handle, x: Handle, *, table: Tensor) -> Compute:
        def add(replay: Replay) -> None:
            types = torch.from_numpy(replay.step.host.token_types).to(self.device)
            replay.add_later(y, table[types].float())

        return add

    def _norm(
        self,
        y: Handle,
        x: Handle,
        residual: Handle | None = None,
        *,
        out_dtype: str,
        **settings: object,
    ) -> Compute:
        dtype = self._act if out_dtype == "act" and residual is None else torch.float32
        outlives_x = y in self._results

        def compute(replay: Replay) -> Tensor | QuantizedRows:
            codes = self._codes(y) if residual is None else None
            value, addend = replay.take(x)
            result: Tensor | QuantizedRows = self.kernels.norm(
                value, out_dtype=dtype, addend=addend, codes=codes, **settings
            )
            return result.clone() if result is value and outlives_x else result

        def add(replay: Replay) -> None:
            replay.add_later(y, cast(Tensor, compute(replay)))

        return compute if residual is None else add

    def _norm_heads(self, y: Handle, x: Handle, **settings: object) -> Compute:
        return lambda replay: cast(Tensor, self.kernels.norm_heads(replay[x], **settings))

    def _rms_norm(self, y: Handle, x: Handle, *, weight: Tensor, eps: float) -> Compute:
        def compute(replay: Replay) -> Tensor | QuantizedRows:
            value, addend = replay.take(x)
            result: Tensor | QuantizedRows = self.kernels.rms_norm(
                value, weight, eps, out_dtype=self._act, addend=addend, codes=self._codes(y)
            )
            return result

        return compute

    def _linear(
        self,
        y: Handle,
        x: Handle,
        residual: Handle | None = None,
        *,
        weight: LinearWeight,
        bias: Tensor | None,
        activation: str,
        out_dtype: str,
        gated: bool = True,
    ) -> Compute:
        multiply = self._multiply(weight, self._act if y in self._narrow else torch.float32)
        activate = self.kernels.gated_activation if gated else self.kernels.activation
        is_act = activation != "" or out_dtype == "act"

        def product(replay: Replay) -> Tensor | QuantizedRows:
            result: Tensor | QuantizedRows = multiply(replay.operand(x), bias)
            if activation:
                result = activate(result, activation, out_dtype=self._act, codes=self._codes(y))
            return result.to(self._act) if is_act and isinstance(result, Tensor) else result

        def add(replay: Replay) -> None:
            replay.add_later(y, cast(Tensor, product(replay)))

        return product if residual is None else add

    def _gated_activation(self, y: Handle, x: Handle, *, activation: str) -> Compute:
        def compute(replay: Replay) -> Tensor | QuantizedRows:
            result: Tensor | QuantizedRows = self.kernels.gated_activation(
                replay[x], activation, out_dtype=self._act, codes=self._codes(y)
            )
            return result

        return compute

    def _activation(self, y: Handle, x: Handle, *, activation: str) -> Compute:
        def compute(replay: Replay) -> Tensor | QuantizedRows:
            result: Tensor | QuantizedRows = self.kernels.activation(
                replay[x], activation, out_dtype=self._act, codes=self._codes(y)
            )
            return result

        return compute

    def _soft_cap(self, y: Handle, x: Handle, *, cap: float) -> Compute:
        return lambda replay: cast(Tensor, self.kernels.soft_cap(replay[x], cap))

    def _clip(self, y: Handle, x: Handle, *, cap: float) -> Compute:
        return lambda replay: cast(Tensor, self.kernels.clip(replay[x], cap))

    def _route(self, y: Handle, x: Handle, **settings: object) -> Compute:
        return lambda replay: cast(Tensor, self.kernels.route(replay[x], **settings))

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
    ) -> Compute:
        act = self._act

        def activated(result: Tensor) -> Tensor:
            if not activation:
                return result.to(act)
            return cast(Tensor, self.kernels.gated_activation(result, activation, out_dtype=act))

        if not isinstance(weight, ExpertMatrices):
            return self._shared_expert(x, routes, residual, weight, bias, activated)
        table = self._expert_table(weight)
        biases = None if bias is None else bias.view(len(table.experts), -1)

        def compute(replay: Replay) -> Tensor | None:
            routed = replay[routes]
            rows = replay.grouped(routes)
            if rows is None:
                rows = replay.group(routes, self.kernels.group_rows(routed, len(table.experts)))
            sums = None if residual is None else replay[residual]
            result = self.kernels.grouped_linear(
                *(replay[x], routed, rows, table, biases), is_by_token=x.rows == "T", sums=sums
            )
            return None if result is None else activated(result)

        return compute

    def _shared_expert(
        self,
        x: Handle,
        routes: Handle,
        residual: Handle | None,
        weight: LinearWeight,
        bias: Tensor | None,
        activated: Callable[[Tensor], Tensor],
    ) -> Compute:
        """That every row takes."""
        multiply = self._multiply(weight)

        def compute(replay: Replay) -> Tensor | None:
            result = multiply(replay[x], bias)
            if residual is None:
                return activated(result)
            replay.add_later(residual, result * replay[routes][:, 1:])
            return None

        return compute

    def _expert_table(self, weight: ExpertMatrices) -> ExpertTable:
        products = [self._multiply(expert) for expert in weight.experts]

        def multiply(expert: int, rows: Tensor, bias: Tensor | None) -> Tensor:
            return products[expert](rows, bias)

        table = ExpertTable(weight.experts, multiply)
        if not table.are_alike:
            self.kernels.refuse_in_native("grouped_linear", "of experts in several formats")
        self.reads_counts |= not table.are_alike
        return table

    def _head_linear(
        self, y: Handle, x: Handle, *, weight: LinearWeight, num_heads: int, out_dtype: str
    ) -> Compute:
        assert isinstance(weight, ExpertMatrices)
        table = self._expert_table(weight)
        dtype = self._act if out_dtype == "act" else torch.float32
        return lambda replay: cast(
            Tensor, self.kernels.head_linear(replay[x], table, out_dtype=dtype)
        )

    def _lora_add(
        self, result: Handle, x: Handle, y: Handle, *, table: AdapterTable, linear_id: int
    ) -> Compute:
        return lambda replay: self._adapted(replay, x, replay[y], table, linear_id)

    def _adapted(
        self, replay: Replay, x: Handle, y: Tensor, table: AdapterTable, linear_id: int
    ) -> Tensor:
        """``y`` of a linear for ``x``, with what adapters add to it in place."""
        for part in table.parts(replay.step.host, linear_id):
            z = self.kernels.linear(replay[x][part.rows], part.a, None).to(self._act)
            y[part.rows, part.outputs] += self.kernels.linear(z, part.b, None)
        return y

    def _rope_cache_write(
        self,
        q: Handle,
        qkv: Handle,
        latent: Handle | None = None,
        *,
        cache: PagedCache,
        layer: int,
        **settings: object,
    ) -> Compute:
        store = self._cache(cache)

        def compute(replay: Replay) -> Tensor:
            keys, values, scales = store.layers[layer]
            step = replay.step
            rows = replay[qkv]
            if latent is not None:
                rows = torch.cat((rows, replay[latent]), dim=1)
            result: Tensor = self.kernels.rope_cache_write(
                *(rows, keys, None if latent is not None else values),
                *(step.positions, step.slots),
                out_dtype=self._act,
                scales=scales,
                **settings,
            )
            return result

        return compute

    def _attention(
        self, y: Handle, q: Handle, *, cache: PagedCache, layer: int, **settings: object
    ) -> Compute:
        store = self._cache(cache)

        def compute(replay: Replay) -> Tensor:
            keys, values, scales = store.layers[layer]
            result: Tensor = self.kernels.attention(
                replay[q], keys, values, replay.step, scales=scales, **settings
            )
            return result

        return compute

    def _gather_logit_rows(self, y: Handle, x: Handle) -> Compute:
        return lambda replay: replay[x][replay.step.logit_token_rows]

    def _codes(self, y: Handle) -> RowFormat | None:
        """What the rows of a value are quantised to by who makes it."""
        weight = self._quantized.get(y)
        return None if weight is None else cast(PackedWeight, weight).row_format

    def _multiply(
        self, weight: LinearWeight, out_dtype: torch.dtype = torch.float32
    ) -> Callable[[Tensor | QuantizedRows, Tensor | None], Tensor]:
        """The product with ``weight`` and the sum with a bias. ``out_dtype``: of dense ones."""
        if isinstance(weight, DeviceWeight):
            matrix = weight.matrix
            if matrix.dtype != torch.bfloat16:
                self.kernels.refuse_in_native("linear", "of matrices in 32 bits")
            return lambda x, bias: cast(
                Tensor, self.kernels.linear(x, matrix, bias, out_dtype=out_dtype)
            )
        kernels, packed = self.kernels, cast(PackedWeight, weight)
        if packed.row_format:
            if packed.format == "fp8":
                kernels.refuse_in_native("linear_quantized", "of fp8 matrices")
            return lambda x, bias: cast(Tensor, kernels.linear_quantized(x, packed, bias))
        if packed.num_inputs % 8:
            kernels.refuse_in_native("linear_packed", f"of {packed.num_inputs} inputs")
        if kernels.unpacks_weights and self._act != torch.float32:
            self._unpacked_bytes = max(self._unpacked_bytes, packed.unpacked_bytes)
        return lambda x, bias: cast(
            Tensor, kernels.linear_packed(x, packed, bias, unpacked=self._unpacked)
        )

    def _cache(self, cache: PagedCache) -> PagedCache:
        if cache not in self._caches:
            self._caches.append(cache)
        return cache
