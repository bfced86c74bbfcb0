"""Recording into a step list: kernels whose arguments are complete but for what a step says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmi_core.ops.cuda import cublaslt
from lmi_core.ops.cuda.activation import ACTIVATIONS
from lmi_core.ops.cuda.arguments import ARGUMENTS
from lmi_core.ops.cuda.attention import DTYPES, not_covered
from lmi_core.ops.cuda.library import DTYPES as DTYPE_NUMBERS
from lmi_core.ops.cuda.norm import most_columns
from lmi_core.ops.cuda.step_list import StepList, StepListSizes
from lmi_core.ops.packed_weight import PackedWeight
from lmi_core.ops.paged_cache import CacheScales, FixedScales, PagedCache
from lmi_core.ops.quantized_rows import CODE_STRIDE, CODE_TYPES
from lmi_core.ops.recorder import FloatArray, Handle, KvCache, LinearWeight, RowSymbol
from lmi_core.ops.torch_weights import DTYPES as TORCH_DTYPES
from lmi_core.ops.torch_weights import DeviceWeight, as_tensor

ALIGNMENT = 256
"""Bytes that every activation starts on."""
_STRUCTS = {
    "embed": "gather_rows",
    "gather_logit_rows": "gather_rows",
    "attention": "decode_attention",
    "linear": "linear_dense",
}
"""Of nodes with another name than their kernel's arguments."""


class NotNativeError(Exception):
    """The model has an op that no native kernel covers; ``op`` and ``reason`` say which and why."""

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(f"{op}: {reason}")
        self.op, self.reason = op, reason


@dataclass(slots=True, eq=False)
class _Value:
    """An activation; ``first``, ``last``: the nodes between which it lives."""

    dtype: torch.dtype
    columns: int
    rows: RowSymbol
    first: int
    last: int
    offset: int = 0

    def num_bytes(self, num_rows: int) -> int:
        num_bytes = num_rows * self.columns * self.dtype.itemsize
        return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class _Node:
    name: str
    rows: RowSymbol
    arguments: dict[str, object]
    """Numbers, dtypes, tensors, activations, and functions that give tensors: what is only known
    when the list is built."""


class RecordedSteps:
    """A started step list and the memory that its kernels use."""

    def __init__(self, steps: StepList, kept: list[object], logits: Tensor) -> None:
        self.list = steps
        self.logits = logits
        """[max_logit_rows, vocab], of the last step."""
        self._kept = kept

    def close(self) -> None:
        """Not while a worker uses the list."""
        self.list.close()
        self._kept.clear()


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
        self._nodes: list[_Node] = []
        self._values: list[_Value] = []
        self._addends: dict[_Value, _Value] = {}
        self._caches: list[PagedCache] = []
        self._logits: _Value | None = None
        self._constants: dict[int, tuple[FloatArray, Tensor]] = {}

    def build(self, sizes: StepListSizes) -> RecordedSteps:
        """A list for steps of these sizes, with the caches as they are now."""
        assert self._logits is not None, "nothing was sampled"
        num_rows = {"T": sizes.max_tokens, "L": sizes.max_logit_rows}
        arena = torch.empty(self._assign_offsets(num_rows), dtype=torch.uint8, device=self.device)
        logits = self._view(arena, self._logits, sizes.max_logit_rows)
        workspace = torch.empty(cublaslt.WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        kept: list[object] = [self, arena, workspace, torch.empty_like(logits)]
        steps = StepList(sizes, self.device)
        try:
            for node in (*self._copies(sizes.block_size), *self._nodes):
                extra: dict[str, object] = {}
                if node.name == "linear":
                    extra = {"workspace": workspace, "workspace_bytes": workspace.numel()}
                elif node.name == "sample":
                    extra = {"modified": kept[-1]}
                self._add(steps, arena, node, extra)
            steps.start()
        except BaseException:
            steps.close()
            raise
        return RecordedSteps(steps, kept, logits)

    def _add(self, steps: StepList, arena: Tensor, node: _Node, extra: dict[str, object]) -> None:
        arguments = {
            name: _plain(value, arena) for name, value in {**node.arguments, **extra}.items()
        }
        struct = ARGUMENTS[_STRUCTS.get(node.name, node.name)]
        steps.add(node.name, node.rows, struct(**arguments))

    def embed(self, table: npt.NDArray[np.generic], scale: float) -> Handle:
        rows = as_tensor(table).to(self.device)
        y = self._value(torch.float32, table.shape[1], "T")
        self._node("embed", y.rows, table=rows, y=y, **_table_of(rows, scale))
        return self._handle("embed", y)

    def rms_norm(self, x: Handle, weight: FloatArray, eps: float) -> Handle:
        self._want_native("rms_norm")
        if x.columns > most_columns(x.columns):
            raise NotNativeError("rms_norm", f"the CUDA kernel has no rows of {x.columns} columns")
        value = cast(_Value, x.value)
        y = self._value(self._act, x.columns, x.rows)
        self._node(
            "rms_norm",
            x.rows,
            x=value,
            addend=self._addends.pop(value, None),
            weight=self._constant(weight),
            y=y,
            num_columns=x.columns,
            eps=eps,
            y_dtype=self._act,
        )
        return self._handle("rms_norm", y)

    def linear(
        self,
        x: Handle,
        weight: LinearWeight,
        *,
        bias: FloatArray | None,
        activation: Literal["", "silu", "gelu_tanh"],
        residual: Handle | None,
        out_dtype: Literal["fp32", "act"],
    ) -> Handle:
        y = self._product(x, weight, None if bias is None else self._constant(bias))
        if activation:
            return self._gated(y, activation)
        if out_dtype == "act":
            raise NotNativeError("linear", f"no kernel rounds its results to {self.act_dtype}")
        if residual is None:
            return self._handle("linear", y)
        target = cast(_Value, residual.value)
        if target in self._addends:
            raise NotNativeError("linear", "two sums follow one another without a norm")
        self._addends[target] = y
        return residual

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
        fixed = scales if isinstance(scales, FixedScales) else FixedScales()
        q = self._value(self._act, num_q_heads * store.head_dim, "T")
        self._node(
            "rope_cache_write",
            "T",
            qkv=qkv.value,
            q=q,
            keys=lambda: store.layers[layer][0],
            values=lambda: store.layers[layer][1],
            cos=self._constant(cos),
            sin=self._constant(sin),
            q_norm=None if q_norm is None else self._constant(q_norm),
            k_norm=None if k_norm is None else self._constant(k_norm),
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
    ) -> Handle:
        self._want_native("attention")
        store = self._cache(cache)
        keys, _, scales = store.layers[layer]
        fixed = scales if isinstance(scales, FixedScales) else FixedScales()
        num_kv_heads = keys.shape[1]
        reason = not_covered(self._act, keys.dtype, num_q_heads // num_kv_heads, store.head_dim)
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
        value = cast(_Value, x.value)
        addend = self._addends.pop(value, None)
        y = self._gather(value)
        if addend is not None:
            self._addends[y] = self._gather(addend)
        return self._handle("gather_logit_rows", y)

    def sample(self, logits: Handle) -> None:
        self._want_native("sample")
        self._logits = cast(_Value, logits.value)
        self._node("sample", "L", logits=self._logits, vocab_size=logits.columns)

    def _gather(self, value: _Value) -> _Value:
        y = self._value(torch.float32, value.columns, "L")
        self._node("gather_logit_rows", "L", table=value, y=y, **_table_of(value, 1.0))
        return y

    def _product(self, x: Handle, weight: LinearWeight, bias: Tensor | None) -> _Value:
        value = cast(_Value, x.value)
        y = self._value(torch.float32, weight.num_outputs, x.rows)
        sizes = {"num_outputs": weight.num_outputs, "num_inputs": weight.num_inputs}
        if isinstance(weight, PackedWeight) and weight.quantizes_inputs:
            self._quantized_product(value, weight, bias, y)
        elif isinstance(weight, PackedWeight):
            self._want_multiplied("linear_packed", value)
            if weight.num_inputs % 8 != 0:
                reason = f"the CUDA kernel has no rows of {weight.num_inputs} inputs"
                raise NotNativeError("linear_packed", reason)
            self._node(
                "linear_packed",
                x.rows,
                x=value,
                panels=weight.panels,
                bias=bias,
                y=y,
                **sizes,
                group_size=weight.group_size,
                is_gated=weight.is_gated,
                dtype=value.dtype,
            )
        elif isinstance(weight, DeviceWeight) and weight.matrix.dtype == value.dtype:
            self._want_multiplied("linear", value)
            reason = cublaslt.unusable_because() or ""
            if reason:
                raise NotNativeError("linear", f"no cuBLASLt ({reason})")
            matrix = weight.matrix
            self._node(
                "linear", x.rows, x=value, weight=matrix, bias=bias, y=y, **sizes, dtype=value.dtype
            )
        else:
            raise NotNativeError("linear", f"weights of {type(weight).__name__}")
        return y

    def _quantized_product(
        self, x: _Value, weight: PackedWeight, bias: Tensor | None, y: _Value
    ) -> None:
        self._want_native("linear_quantized")
        stride = -(-x.columns // CODE_STRIDE) * CODE_STRIDE
        code_type = CODE_TYPES[weight.format]
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

    def _want_multiplied(self, op: str, x: _Value) -> None:
        self._want_native(op)
        if x.dtype not in DTYPES:
            raise NotNativeError(op, f"the CUDA kernel has no {str(x.dtype)[6:]} rows")

    def _gated(self, gate_up: _Value, activation: str) -> Handle:
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

    def _copies(self, block_size: int) -> list[_Node]:
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
            nodes.append(_Node("copy_blocks", "T", arguments))
        return nodes

    def _value(self, dtype: torch.dtype, columns: int, rows: RowSymbol) -> _Value:
        number = len(self._nodes)
        value = _Value(dtype, columns, rows, number, number)
        self._values.append(value)
        return value

    def _node(self, name: str, rows: RowSymbol, **arguments: Any) -> None:
        for value in arguments.values():
            if isinstance(value, _Value):
                assert value not in self._addends, "only a norm adds what is left to be added"
                value.last = len(self._nodes)
        self._nodes.append(_Node(name, rows, arguments))

    def _handle(self, op: str, value: _Value) -> Handle:
        dtype = "fp32" if value.dtype == torch.float32 else self.act_dtype
        name = f"{op}{len(self._nodes)}"
        return Handle(self, name, dtype, value.columns, value.rows, value)

    def _constant(self, values: FloatArray) -> Tensor:
        """``values`` on the device, once for each array (every layer shares the rope tables)."""
        entry = self._constants.get(id(values))
        if entry is None:
            entry = values, torch.from_numpy(values.copy()).to(self.device)
            self._constants[id(values)] = entry
        return entry[1]

    def _assign_offsets(self, num_rows: Mapping[str, int]) -> int:
        """First fit, largest values first: each takes the lowest offset where it overlaps no placed
        value that is alive at the same time. Returns the bytes of all."""
        placed: list[_Value] = []
        total = 0
        for value in sorted(self._values, key=lambda v: -v.num_bytes(num_rows[v.rows])):
            num_bytes, offset = value.num_bytes(num_rows[value.rows]), 0
            for other in placed:
                if value.first > other.last or other.first > value.last:
                    continue
                if offset + num_bytes <= other.offset:
                    break
                offset = max(offset, other.offset + other.num_bytes(num_rows[other.rows]))
            value.offset = offset
            total = max(total, offset + num_bytes)
            placed.append(value)
            placed.sort(key=lambda v: v.offset)
        return total

    @staticmethod
    def _view(arena: Tensor, value: _Value, num_rows: int) -> Tensor:
        num_bytes = num_rows * value.columns * value.dtype.itemsize
        part = arena[value.offset : value.offset + num_bytes]
        return part.view(value.dtype).view(num_rows, value.columns)


def _row_scales(store: PagedCache, layer: int) -> dict[str, object]:
    """Of int8 keys and values, where they lie when the list is built."""
    if not isinstance(store.layers[layer][2], CacheScales):
        return {}
    return {
        "key_scales": lambda: cast(CacheScales, store.layers[layer][2]).keys,
        "value_scales": lambda: cast(CacheScales, store.layers[layer][2]).values,
    }


def _table_of(table: Tensor | _Value, scale: float) -> dict[str, object]:
    columns = table.columns if isinstance(table, _Value) else table.shape[1]
    return {"num_columns": columns, "scale": scale, "table_dtype": table.dtype}


def _plain(value: object, arena: Tensor) -> object:
    """As a struct's field."""
    if isinstance(value, _Value):
        return arena.data_ptr() + value.offset
    if callable(value) and not isinstance(value, Tensor):
        value = cast(Callable[[], Tensor], value)()
    if isinstance(value, Tensor):
        assert value.is_contiguous()
        return value.data_ptr()
    return DTYPE_NUMBERS[value] if isinstance(value, torch.dtype) else value
