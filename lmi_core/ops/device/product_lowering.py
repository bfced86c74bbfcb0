"""Products of a step list: their rows' codes, and the values that kernels leave to one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from lmi_core.ops.device import packed_weight
from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.device.quantized_rows import (
    CODE_TYPES,
    RowFormat,
    fixed_scale,
    kind_of,
    max_outliers,
    stride_of,
)
from lmi_core.ops.device.recorded_steps import Node, UnpackedWeight, Value
from lmi_core.ops.device.torch_weights import DTYPES as TORCH_DTYPES
from lmi_core.ops.device.torch_weights import DeviceWeight
from lmi_core.ops.device.value_uses import narrow_products
from lmi_core.ops.graph import Graph, Handle, RowSymbol, quantized_rows
from lmi_core.ops.kernels.cuda import cublaslt
from lmi_core.ops.kernels.cuda.attention import DTYPES
from lmi_core.ops.operands import LinearWeight


class NotNativeError(Exception):
    """The model has an op that no native kernel covers; ``op`` and ``reason`` say which and why."""

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(f"{op}: {reason}")
        self.op, self.reason = op, reason


class ProductLowering:
    """Nodes and values so far, and what a product adds to them."""

    def __init__(self, graph: Graph, chosen: Mapping[str, str], device: torch.device) -> None:
        """``chosen``: the implementation of every op, see ``ops.select``."""
        self.device = device
        self._chosen = chosen
        self._act = TORCH_DTYPES[graph.act_dtype]
        self.nodes: list[Node] = []
        self._values: list[Value] = []
        self._of_handles: dict[Handle, Value] = {}
        self._addends: dict[Value, Value] = {}
        """What is yet to be added to values."""
        self._quantized = quantized_rows(graph)
        self._narrow = narrow_products(graph)
        self._codes: dict[tuple[Handle, RowFormat], dict[str, object]] = {}
        self._grouped: dict[Handle, tuple[Value, Value, Value]] = {}
        """Of routes, what their rows are by expert."""
        self._shared: dict[Handle, Handle] = {}
        """Results of experts that every row takes, as values of a row for each token."""

    def _product(
        self, x: Handle, weight: LinearWeight, bias: Tensor | None, *, is_narrow: bool = False
    ) -> Value:
        """``is_narrow``: dense ones in the act dtype."""
        is_narrow = is_narrow and isinstance(weight, DeviceWeight)
        y = self._value(self._act if is_narrow else torch.float32, weight.num_outputs, x.rows)
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
            y_dtype=y.dtype,
        )

    def _packed_product(
        self,
        x: Value,
        weight: PackedWeight,
        bias: Tensor | None,
        y: Value,
        experts: Mapping[str, object] | None = None,
    ) -> None:
        """``experts``: the kernel's arguments for experts that are all as ``weight`` is, of which
        none is unpacked."""
        self._want_multiplied("linear_packed", x)
        if weight.num_inputs % 8 != 0:
            reason = f"the CUDA kernel has no rows of {weight.num_inputs} inputs"
            raise NotNativeError("linear_packed", reason)
        self._node(
            "linear_packed",
            y.rows,
            x=x,
            panels=weight.panels,
            bias=bias,
            y=y,
            max_packed_rows=packed_weight.MAX_PACKED_ROWS,
            **(experts or self._room_to_unpack(weight, x.rows, packed_weight.MAX_PACKED_ROWS)),
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
        experts: Mapping[str, object] | None = None,
    ) -> None:
        """``experts``: as ``_packed_product`` has them."""
        self._want_native("linear_quantized")
        if (x, row_format) not in self._codes:
            self._quantize(x, row_format)
        coded, most_rows = self._codes[x, row_format], packed_weight.MAX_PANEL_ROWS[weight.format]
        values = [value for value in coded.values() if isinstance(value, Value)]
        self._values += [value for value in values if value not in self._values]
        self._node(
            "linear_quantized",
            y.rows,
            row_scales=coded["scales"],
            panels=weight.panels,
            bias=bias,
            y=y,
            num_outputs=weight.num_outputs,
            num_inputs=weight.num_inputs,
            group_size=weight.group_size,
            is_gated=weight.is_gated,
            max_panel_rows=most_rows,
            **(experts or self._room_to_unpack(weight, x.rows, most_rows)),
            **{n: value for n, value in coded.items() if n not in ("scales", "fixed_scale")},
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

        code_type, stride = CODE_TYPES[kind_of(row_format)], stride_of(x.columns)
        coded: dict[str, object] = {
            "codes": room(code_type, stride),
            "scales": room(torch.float32, 1),
            "stride": stride,
            "code_type": code_type,
            "fixed_scale": fixed_scale(row_format),
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

    def _want_native(self, op: str) -> None:
        if self._chosen[op] != "native":
            raise NotNativeError(op, f"it runs in {self._chosen[op]}")

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
