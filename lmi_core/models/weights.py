"""A decoder's weights in memory, and the tensors that a checkpoint must hold for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmi_core.models.family import WeightNames
from lmi_core.models.spec import DecoderSpec
from lmi_core.ops.graph import LinearWeight
from lmi_core.weights.formats import FloatArray, PackFormat
from lmi_core.weights.matrix import Matrix


class MappedFile(Protocol):
    """A read-only view of a file's bytes."""

    @property
    def is_lost(self) -> bool:
        """Whether the file was truncated, and zeros were read in its place."""
        ...

    def array(self, offset: int, num_bytes: int) -> npt.NDArray[np.uint8]: ...
    def drop(self, offset: int, num_bytes: int) -> None:
        """These pages aren't needed again."""
        ...


class WeightBackend(Protocol):
    """Maps files and packs matrices for a device; ``parts`` are row-major [n_i, k] in fp32, fp16,
    bf16 (as uint16), fp8 or ``format`` itself, ``gated`` ones are gate and up. int8, int4 and fp8
    quantise what isn't. ``names`` are the parts' in the checkpoint."""

    @property
    def keeps_fp8(self) -> bool:
        """Whether it has products with fp8 matrices."""
        ...

    def open(self, path: Path) -> MappedFile: ...
    def pack(
        self,
        parts: Sequence[Matrix],
        *,
        names: Sequence[str] = (),
        format: PackFormat,
        gated: bool,
    ) -> LinearWeight: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """A packed matrix [outputs, inputs] and its fp32 bias [outputs]."""

    weight: LinearWeight
    bias: FloatArray | None = None

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer's weights, fused as the step graph uses them."""

    attention_norm: FloatArray
    qkv: Linear
    """Query, key and value heads, fused in this order."""
    q_norm: FloatArray | None
    k_norm: FloatArray | None
    attention_output: Linear
    mlp_norm: FloatArray
    gate_up: Linear
    down: Linear

    @property
    def num_bytes(self) -> int:
        linears = (self.qkv, self.attention_output, self.gate_up, self.down)
        norms = (self.attention_norm, self.mlp_norm, self.q_norm, self.k_norm)
        num_norm_bytes = sum(norm.nbytes for norm in norms if norm is not None)
        return sum(linear.num_bytes for linear in linears) + num_norm_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights of a decoder; norms and biases are float32.

    ``embedding`` [vocab, hidden] is a view of the checkpoint's file where its dtype allows: a
    token's row becomes resident when it is first read, and can be dropped again by the system, so a
    tied model holds the matrix once, packed as ``head``.
    """

    embedding: npt.NDArray[np.generic]
    layers: tuple[LayerWeights, ...]
    final_norm: FloatArray
    head: Linear

    @property
    def num_bytes(self) -> int:
        """Bytes that stay resident; an embedding that is a view of its file is not among them."""
        num_bytes = sum(layer.num_bytes for layer in self.layers)
        if self.embedding.flags.owndata:
            num_bytes += self.embedding.nbytes
        return num_bytes + self.final_norm.nbytes + self.head.num_bytes


def expected_shapes(spec: DecoderSpec, names: WeightNames) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this spec holds."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        names.embedding: (spec.vocab_size, hidden),
        names.final_norm: (hidden,),
    }
    if not spec.tied_head:
        shapes[f"{names.head}.weight"] = (spec.vocab_size, hidden)
    for layer_id in range(spec.num_layers):
        prefix = names.layer.format(layer=layer_id)
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(spec, names).items()}
    return shapes


def _layer_shapes(spec: DecoderSpec, names: WeightNames) -> dict[str, tuple[int, ...]]:
    attention, hidden, inner = spec.attention, spec.hidden_size, spec.intermediate_size
    linears = (
        (names.q, attention.q_size, hidden, attention.qkv_bias),
        (names.k, attention.kv_size, hidden, attention.qkv_bias),
        (names.v, attention.kv_size, hidden, attention.qkv_bias),
        (names.attention_output, hidden, attention.q_size, attention.output_bias),
        (names.gate, inner, hidden, spec.mlp_bias),
        (names.up, inner, hidden, spec.mlp_bias),
        (names.down, hidden, inner, spec.mlp_bias),
    )
    shapes: dict[str, tuple[int, ...]] = {
        names.attention_norm: (hidden,),
        names.mlp_norm: (hidden,),
    }
    for name, num_outputs, num_inputs, has_bias in linears:
        shapes[f"{name}.weight"] = (num_outputs, num_inputs)
        if has_bias:
            shapes[f"{name}.bias"] = (num_outputs,)
    if attention.qk_norm:
        shapes |= {names.q_norm: (attention.head_dim,), names.k_norm: (attention.head_dim,)}
    return shapes
