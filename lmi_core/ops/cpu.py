"""Recording into the native step graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import numpy.typing as npt

from lmi_core import _native
from lmi_core.ops.recorder import Activation, Handle, KvCache, LinearWeight, LoraTable, NormKind
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.matrix import Matrix, packable, packed_group_size

if TYPE_CHECKING:
    from lmi_core.weights.packed_model import PackedModel


class NativeWeights:
    """Maps files and packs matrices for the kernels of one instruction set ("": the best).

    What ``packed`` has isn't packed again.
    """

    def __init__(
        self, instruction_set: str = "", num_threads: int = 0, packed: PackedModel | None = None
    ) -> None:
        self.instruction_set = instruction_set
        self.num_threads = num_threads
        self.packed = packed

    @property
    def keeps_fp8(self) -> bool:
        return False

    def open(self, path: Path) -> _native.MappedFile:
        return _native.MappedFile(str(path))

    def pack(
        self,
        parts: Sequence[Matrix],
        *,
        names: Sequence[str] = (),
        format: Literal["fp32", "bf16", "int8", "int4", "fp8"],
        gated: bool,
    ) -> LinearWeight:
        if format == "fp8":
            raise ValueError("the CPU engine has no products with fp8 matrices")
        group_size = packed_group_size(parts, format)
        label = f"{format}{group_size or ''}{' gated' if gated else ''} {' '.join(names)}"
        if self.packed is not None:
            found = self.packed.find(
                label,
                num_outputs=sum(len(part) for part in parts),
                num_inputs=parts[0].shape[1],
                format=format,
                gated=gated,
                group_size=group_size,
            )
            if found is not None:
                return found
        weight = _native.LinearWeight.pack(
            packable(parts, group_size),
            format=format,
            gated=gated,
            group_size=group_size,
            instruction_set=self.instruction_set,
            num_threads=self.num_threads,
        )
        if self.packed is not None:
            self.packed.add(label, weight)
        return weight


class CpuRecorder:
    """Records into ``graph``; the caller finishes it."""

    def __init__(self, graph: _native.Graph) -> None:
        self.graph = graph

    def embed(self, table: npt.NDArray[np.generic], scale: float) -> Handle:
        return self._handle(self.graph.embed(table, scale))

    def add_positions(self, x: Handle, table: npt.NDArray[np.generic], offset: int) -> Handle:
        return self._handle(self.graph.add_positions(_value(x), table, offset))

    def rms_norm(self, x: Handle, weight: FloatArray, eps: float) -> Handle:
        return self._handle(self.graph.norm(_value(x), weight, None, eps))

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
        target = None if residual is None else _value(residual)
        result = self.graph.norm(
            _value(x), weight, bias, eps, kind=kind, residual=target, out_dtype=out_dtype
        )
        return self._handle(result)

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
        result = self.graph.norm_heads(
            _value(x),
            weight,
            bias,
            eps,
            kind=kind,
            first_column=first_column,
            num_groups=num_groups,
        )
        return self._handle(result)

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
        result = self.graph.linear(
            _value(x),
            cast(_native.LinearWeight, weight),
            bias=bias,
            activation=activation,
            residual=None if residual is None else _value(residual),
            out_dtype=out_dtype,
        )
        return self._handle(result)

    def activation(self, x: Handle, activation: Activation, *, gated: bool) -> Handle:
        return self._handle(self.graph.activation(_value(x), activation, gated=gated))

    def soft_cap(self, x: Handle, cap: float) -> Handle:
        return self._handle(self.graph.soft_cap(_value(x), cap))

    def lora_add(self, x: Handle, y: Handle, table: LoraTable, linear_id: int) -> Handle:
        native = cast(_native.LoraTable, table)
        return self._handle(self.graph.lora_add(_value(x), _value(y), native, linear_id))

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
        result = self.graph.rope_cache_write(
            _value(qkv),
            cast(_native.KvCache, cache),
            layer,
            num_q_heads=num_q_heads,
            cos=cos,
            sin=sin,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=norm_eps,
        )
        return self._handle(result)

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
        result = self.graph.attention(
            _value(q),
            cast(_native.KvCache, cache),
            layer,
            num_q_heads=num_q_heads,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            slopes=slopes,
        )
        return self._handle(result)

    def gather_logit_rows(self, x: Handle) -> Handle:
        return self._handle(self.graph.gather_logit_rows(_value(x)))

    def sample(self, logits: Handle) -> None:
        self.graph.sample(_value(logits))

    def _handle(self, native: _native.Handle) -> Handle:
        return Handle(self, native.name, native.dtype, native.columns, native.rows, native)


def _value(handle: Handle) -> _native.Handle:
    return cast(_native.Handle, handle.value)
