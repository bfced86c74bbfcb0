"""What model code sees of a step graph: handles, and the recorder behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray

RowSymbol = Literal["T", "S", "L"]
NormKind = Literal["none", "rms", "layer"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]


class LinearWeight(Protocol):
    """A weight matrix in a recorder's own layout."""

    @property
    def num_outputs(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class KvCache(Protocol):
    """Paged keys and values of all layers, in a recorder's own layout."""

    @property
    def num_bytes(self) -> int: ...


class LoraTable(Protocol):
    """LoRA adapters by slot, in a recorder's own layout: what steps' adapter slots refer to.

    A slot may be changed while steps run, if none of them refers to it.
    """

    def set(
        self, slot: int, adapter: Sequence[Sequence[tuple[LinearWeight, LinearWeight, int]]]
    ) -> None:
        """By linear id, the parts that the adapter adds to: A [rank, inputs], B [outputs, rank],
        both in the act dtype, and the first of the linear's outputs."""
        ...

    def clear(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A value of the step graph while it is recorded: no data, no arithmetic, no truth value."""

    recorder: Recorder
    name: str
    dtype: str
    columns: int
    rows: RowSymbol
    value: object
    """What the recorder itself knows the value by."""

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self.name} has no value while a graph is recorded: don't branch on it")


class Recorder(Protocol):
    """Records calls of ops. Shapes, dtypes and aliasing are those of ``_native.Graph``."""

    def embed(self, table: npt.NDArray[np.generic], scale: float) -> Handle: ...
    def add_positions(self, x: Handle, table: npt.NDArray[np.generic], offset: int) -> Handle: ...
    def rms_norm(self, x: Handle, weight: FloatArray, eps: float) -> Handle: ...
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
    ) -> Handle: ...
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
    ) -> Handle: ...
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
    ) -> Handle: ...
    def activation(self, x: Handle, activation: Activation, *, gated: bool) -> Handle: ...
    def soft_cap(self, x: Handle, cap: float) -> Handle: ...
    def lora_add(self, x: Handle, y: Handle, table: LoraTable, linear_id: int) -> Handle: ...
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
    ) -> Handle: ...
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
    ) -> Handle: ...
    def gather_logit_rows(self, x: Handle) -> Handle: ...
    def sample(self, logits: Handle) -> None: ...
