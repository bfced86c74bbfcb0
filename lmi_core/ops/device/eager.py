"""A step graph of torch calls: recorded once as closures, replayed op by op for every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lmi_core.ops.device.adapter_table import AdapterTable
from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.device.paged_cache import PagedCache
from lmi_core.ops.device.pending_results import PendingResults
from lmi_core.ops.device.quantized_rows import QuantizedRows, RowFormat
from lmi_core.ops.device.sampling_inputs import SamplingInputs
from lmi_core.ops.device.torch_weights import DTYPES, DeviceConstants, DeviceWeight, as_tensor
from lmi_core.ops.kernels.fallback import only_in_torch
from lmi_core.ops.kernels.select import Kernels
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


class Replay:
    """One execution: its step and the values that are still needed."""

    def __init__(self, step: DeviceStep) -> None:
        self.step = step
        self._values: dict[Handle, Tensor | QuantizedRows] = {}
        self._addends: dict[Handle, Tensor] = {}

    def __getitem__(self, handle: Handle) -> Tensor:
        value = cast(Tensor, self._values[handle])
        addend = self.take_addend(handle)
        return value if addend is None else value.add_(addend)

    def operand(self, handle: Handle) -> Tensor | QuantizedRows:
        """The value, which may be quantised already, for a product with quantised weights."""
        value = self._values[handle]
        return value if isinstance(value, QuantizedRows) else self[handle]

    def __setitem__(self, handle: Handle, value: Tensor | QuantizedRows) -> None:
        self._values[handle] = value

    def add_later(self, handle: Handle, addend: Tensor) -> None:
        """Add at the next use of the value, which may do it in its own kernel."""
        self._values[handle] = self[handle]
        self._addends[handle] = addend

    def take(self, handle: Handle) -> tuple[Tensor, Tensor | None]:
        """The value, and what the caller must add to it in place."""
        return cast(Tensor, self._values[handle]), self.take_addend(handle)

    def take_addend(self, handle: Handle) -> Tensor | None:
        return self._addends.pop(handle, None)

    def drop(self, handle: Handle) -> None:
        self._values.pop(handle, None)
        self._addends.pop(handle, None)


@dataclass(slots=True)
class _Node:
    inputs: tuple[Handle, ...]
    run: Callable[[Replay], None]
    row_format: RowFormat | None = None
    """That the first input may come in, quantised."""
    last_used: tuple[Handle, ...] = ()


class EagerRecorder:
    """Records ops as calls of ``kernels`` on ``device``; ``finish`` before the first ``run``."""

    def __init__(
        self, kernels: Kernels, device: torch.device, act_dtype: Literal["fp32", "bf16"]
    ) -> None:
        self.kernels = kernels
        self.device = device
        self.act_dtype = act_dtype
        self._act = DTYPES[act_dtype]
        self._nodes: list[_Node] = []
        self._caches: list[PagedCache] = []
        self._logits: Handle | None = None
        self._constants = DeviceConstants(device)
        self._row_formats: dict[Handle, RowFormat] = {}
        self._unpacked_bytes = 0
        self._unpacked: Tensor | None = None

    def finish(self) -> None:
        """Find out where every value is used last and which are wanted as codes only, and allocate
        what ops share; nothing can be recorded afterwards."""
        self._row_formats = _row_formats(self._nodes)
        seen: set[Handle] = set() if self._logits is None else {self._logits}
        for node in reversed(self._nodes):
            node.last_used = tuple(h for h in dict.fromkeys(node.inputs) if h not in seen)
            seen.update(node.inputs)
        self._constants.clear()
        if self._unpacked_bytes:
            self._unpacked = torch.empty(
                self._unpacked_bytes, dtype=torch.uint8, device=self.device
            )

    @torch.inference_mode()
    def forward(self, step: DeviceStep) -> Tensor:
        """Execute what was recorded, up to the logits; ``sample`` must be among it."""
        if self._logits is None:
            raise ValueError("the graph has no sample op, so a step has no result")
        if len(step.copy_src):
            for cache in self._caches:
                cache.copy_blocks(step.copy_src, step.copy_dst)
        if not self.kernels.is_row_by_row:
            return self._execute(step)
        by_row = [self._execute(row) for row in step.single_rows()]
        return torch.cat([by_row[row] for row in step.host.logit_token_rows] or by_row)

    def _execute(self, step: DeviceStep) -> Tensor:
        assert self._logits is not None
        replay = Replay(step)
        for node in self._nodes:
            node.run(replay)
            for handle in node.last_used:
                replay.drop(handle)
        return replay[self._logits]

    @torch.inference_mode()
    def choose(self, logits: Tensor, sampling: SamplingInputs) -> PendingResults:
        """Execute ``sample``."""
        results: PendingResults = self.kernels.sample(logits, sampling)
        return results

    def embed(self, table: npt.NDArray[np.generic], scale: float) -> Handle:
        rows = as_tensor(table).to(self.device)

        def compute(replay: Replay) -> Tensor:
            x = rows[replay.step.token_ids].float()
            return x if scale == 1.0 else x.mul_(scale)

        return self._record("embed", "fp32", table.shape[1], "T", (), compute)

    def rms_norm(self, x: Handle, weight: FloatArray, eps: float) -> Handle:
        scale = self._constants.put(weight)

        def compute(replay: Replay) -> Tensor | QuantizedRows:
            value, addend = replay.take(x)
            result: Tensor | QuantizedRows = self.kernels.rms_norm(
                value,
                scale,
                eps,
                out_dtype=self._act,
                addend=addend,
                codes=self._row_formats.get(y),
            )
            return result

        y = self._record("rms_norm", self.act_dtype, x.columns, x.rows, (x,), compute)
        return y

    def add_positions(self, x: Handle, table: npt.NDArray[np.generic], offset: int) -> Handle:
        rows = as_tensor(table).to(self.device)

        def add(replay: Replay) -> None:
            replay.add_later(x, rows[replay.step.positions + offset].float())

        self._nodes.append(_Node((x,), add))
        return x

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
    ) -> Handle:
        scale, offset = self._optional(weight), self._optional(bias)
        run = self._torch_op("norm")
        dtype = self._act if out_dtype == "act" else torch.float32

        def compute(replay: Replay) -> Tensor | QuantizedRows:
            codes = self._row_formats.get(y) if residual is None else None
            result: Tensor | QuantizedRows = run(
                replay[x], scale, offset, eps, kind=kind, out_dtype=dtype, codes=codes
            )
            return result

        if residual is not None:
            dtype, y = torch.float32, residual

            def add(replay: Replay) -> None:
                replay.add_later(y, cast(Tensor, compute(replay)))

            self._nodes.append(_Node((x, y), add))
            return y
        name = self.act_dtype if out_dtype == "act" else "fp32"
        y = self._record("norm", name, x.columns, x.rows, (x,), compute)
        return y

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
    ) -> Handle:
        scale = self._constants.put(weight).view(num_groups, -1)
        offset = None if bias is None else self._constants.put(bias).view(num_groups, -1)
        columns = slice(first_column, first_column + weight.size)
        run = self._torch_op("norm")

        def compute(replay: Replay) -> None:
            value = replay[x]
            groups = value[:, columns].reshape(len(value), num_groups, -1)
            y = run(groups, scale, offset, eps, kind=kind, out_dtype=torch.float32)
            value[:, columns] = y.flatten(1)

        self._nodes.append(_Node((x,), compute))
        return x

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
        multiply = self._multiply(weight)
        offset = None if bias is None else self._constants.put(bias)
        is_act = activation != "" or out_dtype == "act"
        activate = self._activate(gated)

        row_format = weight.row_format if isinstance(weight, PackedWeight) else None

        def product(replay: Replay) -> Tensor | QuantizedRows:
            y: Tensor | QuantizedRows = multiply(replay.operand(x), offset)
            if activation:
                y = activate(
                    y, activation, out_dtype=self._act, codes=self._row_formats.get(result)
                )
            return y.to(self._act) if is_act and isinstance(y, Tensor) else y

        if residual is not None:
            result = residual

            def add(replay: Replay) -> None:
                replay.add_later(result, cast(Tensor, product(replay)))

            self._nodes.append(_Node((x, residual), add, row_format))
            return residual
        columns = weight.num_outputs // 2 if activation and gated else weight.num_outputs
        dtype = self.act_dtype if is_act else "fp32"
        result = self._record("linear", dtype, columns, x.rows, (x,), product, row_format)
        return result

    def activation(self, x: Handle, activation: Activation, *, gated: bool) -> Handle:
        activate = self._activate(gated)

        def compute(replay: Replay) -> Tensor | QuantizedRows:
            result: Tensor | QuantizedRows = activate(
                replay[x], activation, out_dtype=self._act, codes=self._row_formats.get(y)
            )
            return result

        columns = x.columns // 2 if gated else x.columns
        y = self._record("activation", self.act_dtype, columns, x.rows, (x,), compute)
        return y

    def soft_cap(self, x: Handle, cap: float) -> Handle:
        run = self._torch_op("soft_cap")

        def compute(replay: Replay) -> None:
            replay[x] = run(replay[x], cap)

        self._nodes.append(_Node((x,), compute))
        return x

    def lora_add(self, x: Handle, y: Handle, table: LoraTable, linear_id: int) -> Handle:
        adapters = cast(AdapterTable, table)

        def add(replay: Replay) -> None:
            rows, result = replay[x], replay[y]
            for part in adapters.parts(replay.step.host, linear_id):
                z = self.kernels.linear(rows[part.rows], part.a, None).to(self._act)
                result[part.rows, part.outputs] += self.kernels.linear(z, part.b, None)
            replay[y] = result

        self._nodes.append(_Node((x, y), add))
        return y

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
        store = self._cache(cache)
        cos_table, sin_table = self._constants.put(cos), self._constants.put(sin)
        q_scale = None if q_norm is None else self._constants.put(q_norm)
        k_scale = None if k_norm is None else self._constants.put(k_norm)

        def compute(replay: Replay) -> Tensor:
            keys, values, scales = store.layers[layer]
            q: Tensor = self.kernels.rope_cache_write(
                replay[qkv],
                keys,
                values,
                replay.step.positions,
                replay.step.slots,
                cos_table,
                sin_table,
                num_q_heads=num_q_heads,
                q_norm=q_scale,
                k_norm=k_scale,
                norm_eps=norm_eps,
                out_dtype=self._act,
                scales=scales,
            )
            return q

        columns = num_q_heads * store.head_dim
        return self._record("rope_cache_write", self.act_dtype, columns, "T", (qkv,), compute)

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
        store = self._cache(cache)
        extra = {}
        if slopes is not None:
            extra["slopes"] = self._constants.put(slopes)

        def compute(replay: Replay) -> Tensor:
            keys, values, scales = store.layers[layer]
            y: Tensor = self.kernels.attention(
                replay[q],
                keys,
                values,
                replay.step,
                num_q_heads=num_q_heads,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                scales=scales,
                **extra,
            )
            return y

        return self._record("attention", self.act_dtype, q.columns, "T", (q,), compute)

    def gather_logit_rows(self, x: Handle) -> Handle:
        def compute(replay: Replay) -> Tensor:
            return replay[x][replay.step.logit_token_rows]

        return self._record("gather_logit_rows", x.dtype, x.columns, "L", (x,), compute)

    def sample(self, logits: Handle) -> None:
        self._logits = logits

    def _record(
        self,
        op: str,
        dtype: str,
        columns: int,
        rows: RowSymbol,
        inputs: tuple[Handle, ...],
        compute: Callable[[Replay], Tensor | QuantizedRows],
        row_format: RowFormat | None = None,
    ) -> Handle:
        handle = Handle(self, f"{op}{len(self._nodes)}", dtype, columns, rows, None)

        def run(replay: Replay) -> None:
            replay[handle] = compute(replay)

        self._nodes.append(_Node(inputs, run, row_format))
        return handle

    def _activate(self, gated: bool) -> Callable[..., Any]:
        return self.kernels.gated_activation if gated else self._torch_op("activation")

    def _torch_op(self, op: str) -> Callable[..., Any]:
        """Of an op that only ``torch_ops`` has."""
        return only_in_torch(op, self.kernels.chosen["rms_norm"], self.kernels.chosen["linear"])

    def _optional(self, values: FloatArray | None) -> Tensor | None:
        return None if values is None else self._constants.put(values)

    def _multiply(
        self, weight: LinearWeight
    ) -> Callable[[Tensor | QuantizedRows, Tensor | None], Tensor]:
        """The product with ``weight`` and the sum with a bias."""
        if isinstance(weight, DeviceWeight):
            matrix = weight.matrix
            return lambda x, bias: cast(Tensor, self.kernels.linear(x, matrix, bias))
        kernels, packed = self.kernels, cast(PackedWeight, weight)
        if packed.row_format:
            return lambda x, bias: cast(Tensor, kernels.linear_quantized(x, packed, bias))
        if kernels.unpacks_weights and self._act != torch.float32:
            self._unpacked_bytes = max(self._unpacked_bytes, packed.unpacked_bytes)
        return lambda x, bias: cast(
            Tensor, kernels.linear_packed(x, packed, bias, unpacked=self._unpacked)
        )

    def _cache(self, cache: KvCache) -> PagedCache:
        store = cast(PagedCache, cache)
        if store not in self._caches:
            self._caches.append(store)
        return store


def _row_formats(nodes: Sequence[_Node]) -> dict[Handle, RowFormat]:
    """Of the values that nobody reads but products with weights of one such format."""
    wanted: dict[Handle, set[RowFormat | None]] = {}
    for node in nodes:
        for position, handle in enumerate(node.inputs):
            row_format = node.row_format if position == 0 else None
            wanted.setdefault(handle, set()).add(row_format)
    single = {handle: formats.pop() for handle, formats in wanted.items() if len(formats) == 1}
    return {handle: row_format for handle, row_format in single.items() if row_format}
