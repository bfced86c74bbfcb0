"""A decoder's weights in memory, and the tensors that a checkpoint must hold for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmi_core.models.linears import layer_linears
from lmi_core.models.spec import DecoderSpec
from lmi_core.ops.graph import JoinedWeight, LinearWeight
from lmi_core.weights.block_matrix import BlockMatrix
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
    quantise what isn't; GGUF's types of blocks are never made of others. ``names`` are the parts'
    in the checkpoint."""

    @property
    def keeps_fp8(self) -> bool:
        """Whether it has products with fp8 matrices."""
        ...

    @property
    def keeps_blocks(self) -> bool:
        """Whether it has products with GGUF's blocks, and with fp16."""
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


Table = npt.NDArray[np.generic] | BlockMatrix
"""Rows by token, or by position."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A packed matrix [outputs, inputs] and its fp32 bias [outputs]."""

    weight: LinearWeight | JoinedWeight
    bias: FloatArray | None = None

    @property
    def num_bytes(self) -> int:
        return self.weight.num_bytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True, slots=True)
class Norm:
    """What a norm multiplies by and adds; None: ones, zeros."""

    weight: FloatArray | None
    bias: FloatArray | None = None

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self.weight, self.bias) if array is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer's weights, fused as the step graph uses them; of norms, those there are."""

    attention_norm: Norm | None
    qkv: Linear
    """Query, key and value heads, fused in this order."""
    q_norm: Norm | None
    """[head_dim], or [num_q_heads head_dim] where heads aren't normed alike; so is ``k_norm``."""
    k_norm: Norm | None
    attention_output: Linear
    attention_post_norm: Norm | None = None
    mlp_norm: Norm | None
    gate_up: Linear
    """Gate and up; up alone where nothing is gated."""
    down: Linear
    mlp_post_norm: Norm | None = None

    @property
    def num_bytes(self) -> int:
        linears = (self.qkv, self.attention_output, self.gate_up, self.down)
        norms = (
            *(self.attention_norm, self.attention_post_norm, self.q_norm, self.k_norm),
            *(self.mlp_norm, self.mlp_post_norm),
        )
        num_norm_bytes = sum(norm.num_bytes for norm in norms if norm is not None)
        return sum(linear.num_bytes for linear in linears) + num_norm_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights of a decoder; norms and biases are float32.

    ``embedding`` [vocab, hidden] is a view of the checkpoint's file where its dtype allows: a
    token's row becomes resident when it is first read, and can be dropped again by the system, so a
    tied model holds the matrix once, packed as ``head``.
    """

    embedding: Table
    positions: Table | None = None
    embedding_norm: Norm | None = None
    project_in: Linear | None = None
    project_out: Linear | None = None
    layers: tuple[LayerWeights, ...]
    final_norm: Norm | None
    """Times the logits' scale."""
    head: Linear | None
    """None: a model whose hidden states are pooled."""

    @property
    def num_bytes(self) -> int:
        """Bytes that stay resident; an embedding that is a view of its file is not among them."""
        num_bytes = sum(layer.num_bytes for layer in self.layers)
        for table in (self.embedding, self.positions):
            if isinstance(table, np.ndarray) and table.flags.owndata:
                num_bytes += table.nbytes
        rest = (self.embedding_norm, self.project_in, self.project_out, self.final_norm, self.head)
        return num_bytes + sum(weights.num_bytes for weights in rest if weights is not None)


def bias_name(weight: str) -> str:
    """Of the bias beside a norm's weight."""
    return weight.removesuffix("weight") + "bias"


def expected_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this spec holds."""
    names, hidden = spec.names, spec.hidden_size
    columns = spec.embedding_columns
    shapes: dict[str, tuple[int, ...]] = {names.embedding: (spec.vocab_size, columns)}
    if names.positions:
        shapes[names.positions] = (spec.num_positions, hidden)
    if names.project_in:
        shapes[f"{names.project_in}.weight"] = (hidden, columns)
        shapes[f"{names.project_out}.weight"] = (columns, hidden)
    shapes |= _norm_shapes(spec, names.embedding_norm, names.final_norm)
    for made in spec.head_layers:
        shapes |= made.shapes
    if spec.has_head and not spec.tied_head:
        shapes[f"{names.head}.weight"] = (spec.vocab_size, columns)
    if spec.has_head and spec.head_bias:
        shapes[f"{names.head}.bias"] = (spec.vocab_size,)
    layer = _layer_shapes(spec)
    for layer_id in range(spec.num_layers):
        prefix = names.layer.format(layer=layer_id)
        shapes |= {prefix + name: shape for name, shape in layer.items()}
    return shapes


def answer_matrix(spec: DecoderSpec) -> str:
    """The tensor whose rows give the logits of tokens."""
    return spec.names.embedding if spec.tied_head else f"{spec.names.head}.weight"


def _norm_shapes(spec: DecoderSpec, *names: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        if name and spec.norm.has_weight:
            shapes[name] = (spec.hidden_size,)
            if spec.norm.bias:
                shapes[bias_name(name)] = (spec.hidden_size,)
    return shapes


def _layer_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    names = spec.names
    shapes = _norm_shapes(
        spec,
        *(names.attention_norm, names.attention_post_norm),
        *(names.mlp_norm, names.mlp_post_norm),
    )
    for source in layer_linears(spec).values():
        for name, num_outputs in source.modules:
            shape = num_outputs, source.num_inputs
            shapes[f"{name}.weight"] = shape[::-1] if names.transposed else shape
            if source.bias:
                shapes[f"{name}.bias"] = (num_outputs,)
    return shapes | qk_norm_shapes(spec)


def qk_norm_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Of the tensors that norm queries and keys."""
    attention, names = spec.attention, spec.names
    shapes: dict[str, tuple[int, ...]] = {}
    for name, num_heads in (
        (names.q_norm, attention.num_q_heads),
        (names.k_norm, attention.num_kv_heads),
    ):
        shape: tuple[int, ...] = (attention.head_dim,)
        if attention.qk_norm == "row":
            shape = (num_heads * attention.head_dim,)
        elif attention.qk_norm == "layers" and "{head}" not in name:
            shape = (num_heads, attention.head_dim)
        if attention.qk_norm:
            shapes |= dict.fromkeys(qk_norm_tensors(name, num_heads), shape)
        if attention.qk_norm == "layer":
            shapes[bias_name(name)] = shape
    return shapes


def qk_norm_tensors(name: str, num_heads: int) -> list[str]:
    """Names of the tensors that ``name`` stands for: where it has ``{head}``, one for each."""
    return list(dict.fromkeys(name.format(head=head) for head in range(num_heads)))
