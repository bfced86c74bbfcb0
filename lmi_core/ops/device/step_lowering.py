"""A step graph as a step list: kernels whose arguments are complete but for what a step says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lmi_core.ops.device.adapter_table import AdapterTable
from lmi_core.ops.device.expert_lowering import ExpertLowering
from lmi_core.ops.device.paged_cache import PagedCache, fixed_of, layer_arguments
from lmi_core.ops.device.product_lowering import NotNativeError
from lmi_core.ops.device.recorded_steps import RecordedSteps, Value, block_copies
from lmi_core.ops.device.step_list import StepListSizes
from lmi_core.ops.device.torch_weights import DeviceConstants
from lmi_core.ops.graph import Graph, Handle
from lmi_core.ops.graph import Node as GraphNode
from lmi_core.ops.kernels.cuda import library
from lmi_core.ops.kernels.cuda.attention import not_covered
from lmi_core.ops.kernels.cuda.norm import KINDS
from lmi_core.ops.operands import LinearWeight


class StepLowering(ExpertLowering):
    """Kernels for the nodes of ``graph``: a method per op, of the node's result, its operands and
    attributes, with arrays as tensors. Raises NotNativeError for what no native kernel covers.

    A sum with a residual is left to the next norm of it, whose kernel adds, unless another sum
    comes first.
    """

    def __init__(self, graph: Graph, chosen: Mapping[str, str], device: torch.device) -> None:
        """``chosen``: the implementation of every op, see ``ops.select``."""
        super().__init__(graph, chosen, device)
        self._caches: list[PagedCache] = []
        self._logits: Value | None = None
        constants = DeviceConstants(device)
        for node in graph.nodes:
            self._lower(node, constants)

    def build(self, sizes: StepListSizes, ranks: int = 0) -> RecordedSteps:
        """A list for steps of these sizes, with the caches as they are now. ``ranks``: the address
        of those that meet in it."""
        assert self._logits is not None, "nothing was sampled"
        nodes = [*block_copies(self._caches, sizes.block_size), *self.nodes]
        sizes = replace(sizes, experts_per_token=self.experts_per_token)
        return RecordedSteps(nodes, self._values, self._logits, sizes, self.device, ranks)

    def _lower(self, node: GraphNode, constants: DeviceConstants) -> None:
        lower = getattr(self, f"_{node.op}", None)
        if lower is None:
            raise NotNativeError(node.op, "it has no CUDA kernel")
        attributes = {
            name: constants.put(value) if isinstance(value, np.ndarray) else value
            for name, value in node.attributes.items()
        }
        lower(node.result, **node.operands, **attributes)

    def _embed(self, y: Handle, *, table: Tensor, scale: float) -> None:
        self._node("embed", y.rows, table=table, y=self._new(y), **_table_of(table, scale))

    def _add_positions(self, y: Handle, x: Handle, *, table: Tensor, offset: int) -> None:
        value = self._of_handles[x]
        self._settle(value)
        self._node(
            "add_positions", "T", table=table, y=value, offset=offset, adds=1, **_table_of(table, 1)
        )

    def _norm(
        self,
        y: Handle,
        x: Handle,
        residual: Handle | None = None,
        *,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        kind: str,
        out_dtype: str,
    ) -> None:
        self._want_normed("norm", x.columns)
        value = self._of_handles[x]
        addend = self._addends.pop(value, None)
        if residual is not None:
            normed = self._value(torch.float32, x.columns, x.rows)
        else:
            normed = self._new(y)
        self._norm_node(value, weight, bias, y=normed, addend=addend, kind=kind, eps=eps)
        if residual is not None:
            self._add_later(self._of_handles[residual], normed)

    def _norm_heads(
        self,
        y: Handle,
        x: Handle,
        *,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        kind: str,
        first_column: int,
        num_groups: int,
    ) -> None:
        num_columns = weight.numel() // num_groups
        self._want_normed("norm_heads", num_columns)
        value = self._of_handles[x]
        self._node(
            "norm",
            x.rows,
            x=value,
            weight=weight,
            bias=bias,
            y=value,
            num_groups=num_groups,
            num_columns=num_columns,
            stride=x.columns,
            first_column=first_column,
            kind=KINDS[kind],
            eps=eps,
            y_dtype=value.dtype,
        )

    def _rms_norm(self, y: Handle, x: Handle, *, weight: Tensor, eps: float) -> None:
        self._want_normed("rms_norm", x.columns)
        value = self._of_handles[x]
        self._node(
            "rms_norm",
            x.rows,
            x=value,
            addend=self._addends.pop(value, None),
            weight=weight,
            num_columns=x.columns,
            eps=eps,
            y_dtype=self._act,
            **self._result(y, is_quantizable=True),
        )

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
    ) -> None:
        product = self._product(x, weight, bias, is_narrow=y in self._narrow)
        if activation:
            self._activate(y, product, activation, is_gated=gated)
        elif residual is not None:
            self._add_later(self._of_handles[residual], product)
        elif out_dtype == "act":
            self._want_normed("norm", y.columns)
            self._norm_node(product, None, None, y=self._new(y))
        else:
            self._of_handles[y] = product

    def _gated_activation(self, y: Handle, x: Handle, *, activation: str) -> None:
        self._activate(y, self._of_handles[x], activation, is_gated=True)

    def _activation(self, y: Handle, x: Handle, *, activation: str) -> None:
        self._activate(y, self._of_handles[x], activation, is_gated=False)

    def _soft_cap(self, y: Handle, x: Handle, *, cap: float) -> None:
        self._bound("soft_cap", x, cap)

    def _clip(self, y: Handle, x: Handle, *, cap: float) -> None:
        self._bound("clip", x, cap)

    def _bound(self, op: str, x: Handle, cap: float) -> None:
        self._want_native(op)
        value = self._of_handles[x]
        self._activation_node(op, value, value, cap=cap)

    def _lora_add(
        self, _: Handle, x: Handle, y: Handle, *, table: AdapterTable, linear_id: int
    ) -> None:
        """Added to what is yet to be added to y, if there is such a sum."""
        rows, value = self._of_handles[x], self._of_handles[y]
        self._want_multiplied("linear", rows)
        if x.columns % 8 != 0:
            raise NotNativeError("lora_add", f"the CUDA kernel has no rows of {x.columns} inputs")
        numbers = library.load().interface.numbers
        num_splits = -(-x.columns // numbers["LORA_SPLIT_INPUTS"])
        columns = num_splits * numbers["MAX_LORA_PARTS"] * table.max_rank
        self._node(
            "lora_add",
            "T",
            x=rows,
            y=self._addends.get(value, value),
            partials=self._value(torch.float32, columns, "T"),
            linear_id=linear_id,
            num_inputs=x.columns,
            num_outputs=y.columns,
            max_rank=table.max_rank,
            dtype=rows.dtype,
        )

    def _rope_cache_write(
        self,
        q: Handle,
        qkv: Handle,
        latent: Handle | None = None,
        *,
        cache: PagedCache,
        layer: int,
        cos: Tensor,
        **settings: object,
    ) -> None:
        self._want_native("rope_cache_write")
        cached = self._cached(cache, layer)
        if latent is not None:
            cached |= {"latent": self._of_handles[latent], "values": None}
        self._node(
            "rope_cache_write",
            "T",
            qkv=self._of_handles[qkv],
            qkv_dtype=self._of_handles[qkv].dtype,
            q=self._new(q),
            cos=cos,
            half_rotary=cos.shape[1],
            **settings,
            q_dtype=self._act,
            key_scale=fixed_of(cache.layers[layer][2]).keys,
            **cached,
        )

    def _attention(
        self,
        y: Handle,
        q: Handle,
        *,
        cache: PagedCache,
        layer: int,
        num_q_heads: int,
        scale: float,
        sees_later: bool = False,
        relative: Tensor | None = None,
        **settings: object,
    ) -> None:
        """``settings``: window, soft cap, slopes and sinks."""
        self._want_native("attention")
        if sees_later or relative is not None:
            raise NotNativeError("attention", "the CUDA kernel shows no token later ones")
        keys, _, scales = cache.layers[layer]
        group = num_q_heads // keys.shape[1]
        shape = (self._act, keys.dtype, group, cache.head_dim, self.device)
        is_plain = settings.get("slopes") is None and settings.get("sinks") is None
        is_latent = cache.is_latent and not (settings["window"] or settings["soft_cap"])
        reason = not_covered(*shape, is_plain=is_plain, is_latent=is_latent)
        if reason:
            raise NotNativeError("attention", f"the CUDA kernel has no {reason}")
        self._node(
            "attention",
            "T",
            q=self._of_handles[q],
            y=self._new(y),
            num_q_heads=num_q_heads,
            scale=scale * fixed_of(scales).keys,
            **settings,
            dtype=self._act,
            **self._cached(cache, layer),
        )

    def _gather_logit_rows(self, y: Handle, x: Handle) -> None:
        """Of the value and of what is yet to be added to it."""
        value = self._of_handles[x]
        addend = self._addends.pop(value, None)
        self._of_handles[y] = self._gather(value)
        if addend is not None:
            self._addends[self._of_handles[y]] = self._gather(addend)

    def _sample(self, _: None, logits: Handle) -> None:
        self._want_native("sample")
        self._logits = self._of_handles[logits]
        self._node("sample", "L", logits=self._logits, vocab_size=logits.columns)

    def _gather(self, value: Value) -> Value:
        y = self._value(torch.float32, value.columns, "L")
        self._node("gather_logit_rows", "L", table=value, y=y, **_table_of(value, 1.0))
        return y

    def _cached(self, cache: PagedCache, layer: int) -> dict[str, object]:
        if cache not in self._caches:
            self._caches.append(cache)
        return layer_arguments(cache, layer)


def _table_of(table: Tensor | Value, scale: float) -> dict[str, object]:
    columns = table.columns if isinstance(table, Value) else table.shape[1]
    return {"num_columns": columns, "scale": scale, "table_dtype": table.dtype}
