"""A step graph as a step list: kernels whose arguments are complete but for what a step says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch import Tensor

from lmi_core.ops.device import packed_weight
from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.device.paged_cache import PagedCache, fixed_of, layer_arguments
from lmi_core.ops.device.quantized_rows import CODE_TYPES, RowFormat, max_outliers, stride_of
from lmi_core.ops.device.recorded_steps import (
    Node,
    RecordedSteps,
    UnpackedWeight,
    Value,
    block_copies,
)
from lmi_core.ops.device.step_list import StepListSizes
from lmi_core.ops.device.torch_weights import DTYPES as TORCH_DTYPES
from lmi_core.ops.device.torch_weights import DeviceConstants, DeviceWeight
from lmi_core.ops.graph import Graph, Handle, LinearWeight, RowSymbol
from lmi_core.ops.graph import Node as GraphNode
from lmi_core.ops.kernels.cuda import cublaslt
from lmi_core.ops.kernels.cuda.activation import ACTIVATIONS, can_quantize
from lmi_core.ops.kernels.cuda.attention import DTYPES, not_covered
from lmi_core.ops.kernels.cuda.norm import most_columns


class NotNativeError(Exception):
    """The model has an op that no native kernel covers; ``op`` and ``reason`` say which and why."""

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(f"{op}: {reason}")
        self.op, self.reason = op, reason


class StepLowering:
    """Kernels for the nodes of ``graph``: a method per op, of the node's result, its operands and
    attributes, with arrays as tensors. Raises NotNativeError for what no native kernel covers.

    A sum with a residual is left to the next norm of it, whose kernel adds.
    """

    def __init__(self, graph: Graph, chosen: Mapping[str, str], device: torch.device) -> None:
        """``chosen``: the implementation of every op, see ``ops.select``."""
        self.device = device
        self._chosen = chosen
        self._act_name = graph.act_dtype
        self._act = TORCH_DTYPES[graph.act_dtype]
        self.nodes: list[Node] = []
        self._values: list[Value] = []
        self._of_handles: dict[Handle, Value] = {}
        self._addends: dict[Value, Value] = {}
        self._quantized = graph.quantized_rows()
        self._codes: dict[tuple[Handle, RowFormat], dict[str, object]] = {}
        self._caches: list[PagedCache] = []
        self._logits: Value | None = None
        constants = DeviceConstants(device)
        for node in graph.nodes:
            self._lower(node, constants)

    def build(self, sizes: StepListSizes) -> RecordedSteps:
        """A list for steps of these sizes, with the caches as they are now."""
        assert self._logits is not None, "nothing was sampled"
        nodes = [*block_copies(self._caches, sizes.block_size), *self.nodes]
        return RecordedSteps(nodes, self._values, self._logits, sizes, self.device)

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

    def _rms_norm(self, y: Handle, x: Handle, *, weight: Tensor, eps: float) -> None:
        self._want_native("rms_norm")
        if x.columns > most_columns(x.columns):
            raise NotNativeError("rms_norm", f"the CUDA kernel has no rows of {x.columns} columns")
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
        if activation and (not gated or activation not in ACTIVATIONS):
            raise NotNativeError("linear", f"the CUDA kernel has no {activation}")
        product = self._product(x, weight, bias)
        if activation:
            self._activate(y, product, activation)
        elif out_dtype == "act":
            raise NotNativeError("linear", f"no kernel rounds its results to {self._act_name}")
        elif residual is None:
            self._of_handles[y] = product
        else:
            target = self._of_handles[residual]
            if target in self._addends:
                raise NotNativeError("linear", "two sums follow one another without a norm")
            self._addends[target] = product

    def _gated_activation(self, y: Handle, x: Handle, *, activation: str) -> None:
        if activation not in ACTIVATIONS:
            raise NotNativeError("gated_activation", f"the CUDA kernel has no {activation}")
        self._activate(y, self._of_handles[x], activation)

    def _lora_add(self, *_: Handle, **attributes: object) -> NoReturn:
        raise NotNativeError("lora_add", "LoRA adapters have no CUDA kernel")

    def _rope_cache_write(
        self,
        q: Handle,
        qkv: Handle,
        *,
        cache: PagedCache,
        layer: int,
        cos: Tensor,
        **settings: object,
    ) -> None:
        self._want_native("rope_cache_write")
        self._node(
            "rope_cache_write",
            "T",
            qkv=self._of_handles[qkv],
            q=self._new(q),
            cos=cos,
            half_rotary=cos.shape[1],
            **settings,
            q_dtype=self._act,
            key_scale=fixed_of(cache.layers[layer][2]).keys,
            **self._cached(cache, layer),
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
        slopes: Tensor | None = None,
        sinks: Tensor | None = None,
        **settings: float,
    ) -> None:
        self._want_native("attention")
        if sinks is not None:
            raise NotNativeError("attention", "the CUDA kernel has no sinks")
        if slopes is not None:
            raise NotNativeError("attention", "the CUDA kernel has no ALiBi")
        keys, _, scales = cache.layers[layer]
        group = num_q_heads // keys.shape[1]
        reason = not_covered(self._act, keys.dtype, group, cache.head_dim, self.device)
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

    def _product(self, x: Handle, weight: LinearWeight, bias: Tensor | None) -> Value:
        y = self._value(torch.float32, weight.num_outputs, x.rows)
        if isinstance(weight, PackedWeight) and weight.row_format:
            self._quantized_product(x, weight, weight.row_format, bias, y)
        elif isinstance(weight, PackedWeight):
            self._packed_product(self._of_handles[x], weight, bias, y)
        else:
            self._dense_product(self._of_handles[x], cast(DeviceWeight, weight), bias, y)
        return y

    def _dense_product(self, x: Value, weight: DeviceWeight, bias: Tensor | None, y: Value) -> None:
        self._want_multiplied("linear", x)
        matrix = weight.matrix
        if matrix.dtype != x.dtype:
            names = f"{str(matrix.dtype)[6:]} weights for {str(x.dtype)[6:]} rows"
            raise NotNativeError("linear", f"the CUDA kernel has no {names}")
        missing = cublaslt.unusable_because()
        if missing is not None:
            raise NotNativeError("linear", f"no cuBLASLt ({missing})")
        self._node(
            "linear",
            x.rows,
            x=x,
            weight=matrix,
            bias=bias,
            y=y,
            num_outputs=weight.num_outputs,
            num_inputs=weight.num_inputs,
            y_stride=weight.num_outputs,
            dtype=x.dtype,
        )

    def _packed_product(
        self, x: Value, weight: PackedWeight, bias: Tensor | None, y: Value
    ) -> None:
        self._want_multiplied("linear_packed", x)
        if weight.num_inputs % 8 != 0:
            reason = f"the CUDA kernel has no rows of {weight.num_inputs} inputs"
            raise NotNativeError("linear_packed", reason)
        self._node(
            "linear_packed",
            x.rows,
            x=x,
            panels=weight.panels,
            bias=bias,
            y=y,
            max_packed_rows=packed_weight.MAX_PACKED_ROWS,
            **self._room_to_unpack(weight, x.rows, packed_weight.MAX_PACKED_ROWS),
            num_outputs=weight.num_outputs,
            num_inputs=weight.num_inputs,
            group_size=weight.group_size,
            is_gated=weight.is_gated,
            dtype=x.dtype,
        )

    def _quantized_product(
        self,
        x: Handle,
        weight: PackedWeight,
        row_format: RowFormat,
        bias: Tensor | None,
        y: Value,
    ) -> None:
        self._want_native("linear_quantized")
        if (x, row_format) not in self._codes:
            self._quantize(x, row_format)
        coded = self._codes[x, row_format]
        values = [value for value in coded.values() if isinstance(value, Value)]
        self._values += [value for value in values if value not in self._values]
        self._node(
            "linear_quantized",
            x.rows,
            row_scales=coded["scales"],
            panels=weight.panels,
            bias=bias,
            y=y,
            num_outputs=weight.num_outputs,
            num_inputs=weight.num_inputs,
            group_size=weight.group_size,
            is_gated=weight.is_gated,
            max_panel_rows=packed_weight.MAX_PANEL_ROWS,
            **self._room_to_unpack(weight, x.rows, packed_weight.MAX_PANEL_ROWS),
            **{name: value for name, value in coded.items() if name != "scales"},
        )

    def _room_to_unpack(
        self, weight: PackedWeight, rows: RowSymbol, most_rows: int
    ) -> dict[str, object]:
        """For steps of more rows; nothing where none are unpacked."""
        num_bytes = weight.unpacked_bytes
        if not num_bytes or not cublaslt.can_unpack():
            return {}
        node_id = len(self.nodes)
        room = UnpackedWeight(torch.uint8, num_bytes, rows, node_id, node_id, most_rows=most_rows)
        self._values.append(room)
        return {"unpacked": room, "unpacked_bytes": num_bytes}

    def _quantize(self, x: Handle, row_format: RowFormat) -> None:
        value = self._of_handles[x]
        self._node(
            "quantize_rows",
            x.rows,
            x=value,
            num_columns=x.columns,
            dtype=value.dtype,
            **self._coded(x, row_format),
        )

    def _coded(self, x: Handle, row_format: RowFormat) -> dict[str, object]:
        """Room for the codes of x, as arguments of the kernel that makes them."""
        number = len(self.nodes)

        def room(dtype: torch.dtype, columns: int) -> Value:
            return Value(dtype, columns, x.rows, number, number)

        code_type, stride = CODE_TYPES[row_format], stride_of(x.columns)
        coded: dict[str, object] = {
            "codes": room(code_type, stride),
            "scales": room(torch.float32, 1),
            "stride": stride,
            "code_type": code_type,
        }
        if row_format == "outliers":
            width = 1 + max_outliers(x.columns)
            coded |= {"outliers": room(torch.int32, width), "outlier_stride": width}
        self._codes[x, row_format] = coded
        return coded

    def _result(self, y: Handle, *, is_quantizable: bool) -> dict[str, object]:
        """Room for y as arguments of its kernel, as codes where only those are read."""
        weight = self._quantized.get(y)
        if weight is None or not is_quantizable:
            return {"y": self._new(y)}
        row_format = cast(PackedWeight, weight).row_format
        assert row_format is not None
        return self._coded(y, row_format)

    def _want_multiplied(self, op: str, x: Value) -> None:
        self._want_native(op)
        if x.dtype not in DTYPES:
            raise NotNativeError(op, f"the CUDA kernel has no {str(x.dtype)[6:]} rows")

    def _activate(self, y: Handle, gate_up: Value, activation: str) -> None:
        self._want_native("gated_activation")
        self._node(
            "gated_activation",
            y.rows,
            gate_up=gate_up,
            num_columns=y.columns,
            activation=ACTIVATIONS[activation],
            y_dtype=self._act,
            **self._result(y, is_quantizable=can_quantize(y.columns)),
        )

    def _want_native(self, op: str) -> None:
        if self._chosen[op] != "native":
            raise NotNativeError(op, f"it runs in {self._chosen[op]}")

    def _cached(self, cache: PagedCache, layer: int) -> dict[str, object]:
        if cache not in self._caches:
            self._caches.append(cache)
        return layer_arguments(cache, layer)

    def _new(self, y: Handle) -> Value:
        dtype = torch.float32 if y.dtype == "fp32" else self._act
        self._of_handles[y] = self._value(dtype, y.columns, y.rows)
        return self._of_handles[y]

    def _value(self, dtype: torch.dtype, columns: int, rows: RowSymbol) -> Value:
        number = len(self.nodes)
        value = Value(dtype, columns, rows, number, number)
        self._values.append(value)
        return value

    def _node(self, name: str, rows: RowSymbol, **arguments: Any) -> None:
        for value in arguments.values():
            if isinstance(value, Value):
                assert value not in self._addends, "only a norm adds what is left to be added"
                value.last = len(self.nodes)
        self.nodes.append(Node(name, rows, arguments))


def _table_of(table: Tensor | Value, scale: float) -> dict[str, object]:
    columns = table.columns if isinstance(table, Value) else table.shape[1]
    return {"num_columns": columns, "scale": scale, "table_dtype": table.dtype}
