"""Recording into a step list: kernels whose arguments are complete but for what a step says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NoReturn, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmi_core.ops.device import packed_weight
from lmi_core.ops.device.fusion import fuse_quantization
from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.device.paged_cache import CacheScales, PagedCache, fixed_of
from lmi_core.ops.device.quantized_rows import CODE_TYPES, stride_of
from lmi_core.ops.device.recorded_steps import Node, RecordedSteps, UnpackedWeight, Value
from lmi_core.ops.device.step_list import StepListSizes
from lmi_core.ops.device.torch_weights import DTYPES as TORCH_DTYPES
from lmi_core.ops.device.torch_weights import DeviceConstants, DeviceWeight, as_tensor
from lmi_core.ops.kernels.cuda import cublaslt
from lmi_core.ops.kernels.cuda.activation import ACTIVATIONS
from lmi_core.ops.kernels.cuda.attention import DTYPES, not_covered
from lmi_core.ops.kernels.cuda.norm import most_columns
from lmi_core.ops.recorder import (
    Activation,
    Handle,
    KvCache,
    LinearWeight,
    LoraTable,
    NormKind,
    RowSymbol,
)
from lmi_core.weights.formats import FloatArray


class NotNativeError(Exception):
    """The model has an op that no native kernel covers; ``op`` and ``reason`` say which and why."""

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(f"{op}: {reason}")
        self.op, self.reason = op, reason


class StepRecorder:
    """Implements ``Recorder``; raises NotNativeError for what no native kernel covers.

    A sum with a residual is left to the next norm of it, whose kernel adds.
    """

    def __init__(
        self,
        chosen: Mapping[str, str],
        device: torch.device,
        act_dtype: Literal["fp32", "bf16"],
    ) -> None:
        """``chosen``: the implementation of every op, see ``ops.select``."""
        self.device = device
        self._chosen = chosen
        self.act_dtype = act_dtype
        self._act = TORCH_DTYPES[act_dtype]
        self._nodes: list[Node] = []
        self._values: list[Value] = []
        self._addends: dict[Value, Value] = {}
        self._caches: list[PagedCache] = []
        self._logits: Value | None = None
        self._constants = DeviceConstants(device)

    def build(self, sizes: StepListSizes) -> RecordedSteps:
        """A list for steps of these sizes, with the caches as they are now."""
        assert self._logits is not None, "nothing was sampled"
        fuse_quantization(self._nodes, self._values)
        nodes = [*self._copies(sizes.block_size), *self._nodes]
        return RecordedSteps(nodes, self._values, self._logits, sizes, self.device)

    def embed(self, table: npt.NDArray[np.generic], scale: float) -> Handle:
        rows = as_tensor(table).to(self.device)
        y = self._value(torch.float32, table.shape[1], "T")
        self._node("embed", y.rows, table=rows, y=y, **_table_of(rows, scale))
        return self._handle("embed", y)

    def rms_norm(self, x: Handle, weight: FloatArray, eps: float) -> Handle:
        self._want_native("rms_norm")
        if x.columns > most_columns(x.columns):
            raise NotNativeError("rms_norm", f"the CUDA kernel has no rows of {x.columns} columns")
        value = cast(Value, x.value)
        y = self._value(self._act, x.columns, x.rows)
        self._node(
            "rms_norm",
            x.rows,
            x=value,
            addend=self._addends.pop(value, None),
            weight=self._constants.put(weight),
            y=y,
            num_columns=x.columns,
            eps=eps,
            y_dtype=self._act,
        )
        return self._handle("rms_norm", y)

    def add_positions(self, x: Handle, table: npt.NDArray[np.generic], offset: int) -> NoReturn:
        raise NotNativeError("add_positions", "learned positions have no CUDA kernel")

    def norm(
        self,
        x: Handle,
        weight: FloatArray | None,
        bias: FloatArray | None,
        eps: float,
        *,
        kind: NormKind,
        residual: Handle | None,
        out_dtype: Literal["fp32", "act"],
    ) -> NoReturn:
        raise NotNativeError("norm", "no CUDA kernel but for RMS norms before linears")

    def norm_heads(
        self,
        x: Handle,
        weight: FloatArray,
        bias: FloatArray | None,
        eps: float,
        *,
        kind: NormKind,
        first_column: int,
        num_groups: int,
    ) -> NoReturn:
        raise NotNativeError("norm_heads", "norms of all heads together have no CUDA kernel")

    def linear(
        self,
        x: Handle,
        weight: LinearWeight,
        *,
        bias: FloatArray | None,
        activation: Activation | Literal[""],
        gated: bool,
        residual: Handle | None,
        out_dtype: Literal["fp32", "act"],
    ) -> Handle:
        y = self._product(x, weight, None if bias is None else self._constants.put(bias))
        if activation:
            return self._activated(y, activation, gated)
        if out_dtype == "act":
            raise NotNativeError("linear", f"no kernel rounds its results to {self.act_dtype}")
        if residual is None:
            return self._handle("linear", y)
        target = cast(Value, residual.value)
        if target in self._addends:
            raise NotNativeError("linear", "two sums follow one another without a norm")
        self._addends[target] = y
        return residual

    def activation(self, x: Handle, activation: Activation, *, gated: bool) -> Handle:
        return self._activated(cast(Value, x.value), activation, gated)

    def soft_cap(self, x: Handle, cap: float) -> NoReturn:
        raise NotNativeError("soft_cap", "soft caps of logits have no CUDA kernel")

    def lora_add(self, x: Handle, y: Handle, table: LoraTable, linear_id: int) -> NoReturn:
        raise NotNativeError("lora_add", "LoRA adapters have no CUDA kernel")

    def rope_cache_write(
        self,
        qkv: Handle,
        cache: KvCache,
        layer: int,
        *,
        num_q_heads: int,
        cos: FloatArray,
        sin: FloatArray,
        q_norm: FloatArray | None,
        k_norm: FloatArray | None,
        norm_eps: float,
    ) -> Handle:
        self._want_native("rope_cache_write")
        store = self._cache(cache)
        keys, _, scales = store.layers[layer]
        fixed = fixed_of(scales)
        q = self._value(self._act, num_q_heads * store.head_dim, "T")
        self._node(
            "rope_cache_write",
            "T",
            qkv=qkv.value,
            q=q,
            keys=lambda: store.layers[layer][0],
            values=lambda: store.layers[layer][1],
            cos=self._constants.put(cos),
            sin=self._constants.put(sin),
            q_norm=None if q_norm is None else self._constants.put(q_norm),
            k_norm=None if k_norm is None else self._constants.put(k_norm),
            num_q_heads=num_q_heads,
            num_kv_heads=keys.shape[1],
            head_dim=store.head_dim,
            half_rotary=cos.shape[1],
            norm_eps=norm_eps,
            q_dtype=self._act,
            kv_dtype=keys.dtype,
            key_scale=fixed.keys,
            value_scale=fixed.values,
            **_row_scales(store, layer),
        )
        return self._handle("rope_cache_write", q)

    def attention(
        self,
        q: Handle,
        cache: KvCache,
        layer: int,
        *,
        num_q_heads: int,
        scale: float,
        window: int,
        soft_cap: float,
        slopes: FloatArray | None,
    ) -> Handle:
        self._want_native("attention")
        if slopes is not None:
            raise NotNativeError("attention", "the CUDA kernel has no ALiBi")
        store = self._cache(cache)
        keys, _, scales = store.layers[layer]
        fixed = fixed_of(scales)
        num_kv_heads = keys.shape[1]
        group = num_q_heads // num_kv_heads
        reason = not_covered(self._act, keys.dtype, group, store.head_dim, self.device)
        if reason:
            raise NotNativeError("attention", f"the CUDA kernel has no {reason}")
        y = self._value(self._act, q.columns, "T")
        self._node(
            "attention",
            "T",
            q=q.value,
            keys=lambda: store.layers[layer][0],
            values=lambda: store.layers[layer][1],
            y=y,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=store.head_dim,
            window=window,
            scale=scale * fixed.keys,
            soft_cap=soft_cap,
            dtype=self._act,
            kv_dtype=keys.dtype,
            value_scale=fixed.values,
            **_row_scales(store, layer),
        )
        return self._handle("attention", y)

    def gather_logit_rows(self, x: Handle) -> Handle:
        """Of the value and of what is yet to be added to it."""
        value = cast(Value, x.value)
        addend = self._addends.pop(value, None)
        y = self._gather(value)
        if addend is not None:
            self._addends[y] = self._gather(addend)
        return self._handle("gather_logit_rows", y)

    def sample(self, logits: Handle) -> None:
        self._want_native("sample")
        self._logits = cast(Value, logits.value)
        self._node("sample", "L", logits=self._logits, vocab_size=logits.columns)

    def _gather(self, value: Value) -> Value:
        y = self._value(torch.float32, value.columns, "L")
        self._node("gather_logit_rows", "L", table=value, y=y, **_table_of(value, 1.0))
        return y

    def _product(self, x: Handle, weight: LinearWeight, bias: Tensor | None) -> Value:
        value = cast(Value, x.value)
        y = self._value(torch.float32, weight.num_outputs, x.rows)
        if not isinstance(weight, PackedWeight):
            self._dense_product(value, cast(DeviceWeight, weight), bias, y)
        elif weight.row_format:
            self._quantized_product(value, weight, CODE_TYPES[weight.row_format], bias, y)
        else:
            self._packed_product(value, weight, bias, y)
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
        unpacked = None
        if cublaslt.can_unpack():
            node_id = len(self._nodes)
            num_bytes = weight.unpacked_bytes
            unpacked = UnpackedWeight(torch.uint8, num_bytes, x.rows, node_id, node_id)
            self._values.append(unpacked)
        self._node(
            "linear_packed",
            x.rows,
            x=x,
            panels=weight.panels,
            bias=bias,
            y=y,
            unpacked=unpacked,
            unpacked_bytes=weight.unpacked_bytes,
            max_packed_rows=packed_weight.MAX_PACKED_ROWS,
            num_outputs=weight.num_outputs,
            num_inputs=weight.num_inputs,
            group_size=weight.group_size,
            is_gated=weight.is_gated,
            dtype=x.dtype,
        )

    def _quantized_product(
        self,
        x: Value,
        weight: PackedWeight,
        code_type: torch.dtype,
        bias: Tensor | None,
        y: Value,
    ) -> None:
        self._want_native("linear_quantized")
        stride = stride_of(x.columns)
        codes = self._value(code_type, stride, x.rows)
        scales = self._value(torch.float32, 1, x.rows)
        self._node(
            "quantize_rows",
            x.rows,
            x=x,
            codes=codes,
            scales=scales,
            num_columns=x.columns,
            stride=stride,
            dtype=x.dtype,
            code_type=code_type,
        )
        self._node(
            "linear_quantized",
            x.rows,
            codes=codes,
            row_scales=scales,
            panels=weight.panels,
            bias=bias,
            y=y,
            num_outputs=weight.num_outputs,
            num_inputs=weight.num_inputs,
            stride=stride,
            group_size=weight.group_size,
            is_gated=weight.is_gated,
            code_type=code_type,
        )

    def _want_multiplied(self, op: str, x: Value) -> None:
        self._want_native(op)
        if x.dtype not in DTYPES:
            raise NotNativeError(op, f"the CUDA kernel has no {str(x.dtype)[6:]} rows")

    def _activated(self, gate_up: Value, activation: str, gated: bool) -> Handle:
        if not gated or activation not in ACTIVATIONS:
            raise NotNativeError("activation", f"no CUDA kernel for {activation}")
        self._want_native("gated_activation")
        y = self._value(self._act, gate_up.columns // 2, gate_up.rows)
        self._node(
            "gated_activation",
            y.rows,
            gate_up=gate_up,
            y=y,
            num_columns=y.columns,
            activation=ACTIVATIONS[activation],
            y_dtype=self._act,
        )
        return self._handle("gated_activation", y)

    def _want_native(self, op: str) -> None:
        if self._chosen[op] != "native":
            raise NotNativeError(op, f"it runs in {self._chosen[op]}")

    def _cache(self, cache: KvCache) -> PagedCache:
        store = cast(PagedCache, cache)
        if store not in self._caches:
            self._caches.append(store)
        return store

    def _copies(self, block_size: int) -> list[Node]:
        """Of whole blocks, in every store of every cache."""
        nodes = []
        for store in (store for cache in self._caches for store in cache.stores):
            layer_bytes = store[0].numel() * store.element_size()
            arguments: dict[str, object] = {
                "store": store,
                "layer_bytes": layer_bytes,
                "block_bytes": layer_bytes // store.shape[1] * block_size,
                "num_layers": len(store),
            }
            nodes.append(Node("copy_blocks", "T", arguments))
        return nodes

    def _value(self, dtype: torch.dtype, columns: int, rows: RowSymbol) -> Value:
        number = len(self._nodes)
        value = Value(dtype, columns, rows, number, number)
        self._values.append(value)
        return value

    def _node(self, name: str, rows: RowSymbol, **arguments: Any) -> None:
        for value in arguments.values():
            if isinstance(value, Value):
                assert value not in self._addends, "only a norm adds what is left to be added"
                value.last = len(self._nodes)
        self._nodes.append(Node(name, rows, arguments))

    def _handle(self, op: str, value: Value) -> Handle:
        dtype = "fp32" if value.dtype == torch.float32 else self.act_dtype
        name = f"{op}{len(self._nodes)}"
        return Handle(self, name, dtype, value.columns, value.rows, value)


def _row_scales(store: PagedCache, layer: int) -> dict[str, object]:
    """Of int8 keys and values, where they lie when the list is built."""
    if not isinstance(store.layers[layer][2], CacheScales):
        return {}
    return {
        "key_scales": lambda: cast(CacheScales, store.layers[layer][2]).keys,
        "value_scales": lambda: cast(CacheScales, store.layers[layer][2]).values,
    }


def _table_of(table: Tensor | Value, scale: float) -> dict[str, object]:
    columns = table.columns if isinstance(table, Value) else table.shape[1]
    return {"num_columns": columns, "scale": scale, "table_dtype": table.dtype}
