"""A decoder's weights in memory, what maps and packs them, and some of their names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmi_core.models.spec import DecoderSpec
from lmi_core.ops.operands import JoinedWeight, LinearWeight, SlicedWeight, Table
from lmi_core.weights.formats import FloatArray, PackFormat
from lmi_core.weights.fp8_matrix import Fp8Matrix
from lmi_core.weights.matrix import Matrix


class WeightPacker(Protocol):
    """Packs matrices for a device; ``parts`` are row-major [n_i, k] in fp32, fp16,
    bf16 (as uint16), fp8 or ``format`` itself, ``gated`` ones are gate and up. int8, int4 and fp8
    quantise what isn't; GGUF's types of blocks are never made of others. ``names`` are the parts'
    in the checkpoint."""

    def keeps_fp8(self, parts: Sequence[Fp8Matrix]) -> bool:
        """Whether it has products with such matrices, as one."""
        ...

    @property
    def keeps_blocks(self) -> bool:
        """Whether it has products with GGUF's blocks, 4-bit codes of floats, and fp16."""
        ...

    @property
    def knows_finite(self) -> bool:
        """Whether the checkpoint was packed before, when its numbers were found finite."""
        ...

    def pack(
        self,
        parts: Sequence[Matrix],
        *,
        names: Sequence[str] = (),
        format: PackFormat,
        gated: bool,
    ) -> LinearWeight: ...
    def pack_experts(
        self,
        experts: Sequence[Sequence[Matrix]],
        *,
        names: Sequence[str] = (),
        format: PackFormat,
        gated: bool,
    ) -> LinearWeight:
        """Matrices of one shape, each of its own parts."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """A packed matrix [outputs, inputs] and its fp32 bias [outputs]."""

    weight: LinearWeight | JoinedWeight | SlicedWeight
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
class LatentAttention:
    """From the stream to queries and keys in the latent space, and from there to values."""

    q_a: Linear | None
    q_a_norm: FloatArray | None
    q: Linear
    kv_a: Linear
    """To the rotary part and the latent."""
    kv_a_norm: FloatArray
    to_latent: LinearWeight
    """Of all heads."""
    from_latent: LinearWeight

    @property
    def num_bytes(self) -> int:
        weights = (self.q_a, self.q, self.kv_a, self.to_latent, self.from_latent)
        norms = (self.q_a_norm, self.kv_a_norm)
        num_norm_bytes = sum(norm.nbytes for norm in norms if norm is not None)
        return num_norm_bytes + sum(weight.num_bytes for weight in weights if weight is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture: linears of all its experts, and what chooses among them."""

    router: Linear
    choice_bias: FloatArray | None
    gate_up: Linear
    down: Linear

    @property
    def num_bytes(self) -> int:
        bias = 0 if self.choice_bias is None else self.choice_bias.nbytes
        return bias + sum(x.num_bytes for x in (self.router, self.gate_up, self.down))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer's weights, fused as the step graph uses them; of norms, those there are."""

    attention_norm: Norm | None
    qkv: Linear | None
    """Query, key and value heads, fused in this order."""
    latent: LatentAttention | None = None
    """Instead of ``qkv``."""
    q_norm: Norm | None
    """[head_dim], or [num_q_heads head_dim] where heads aren't normed alike; so is ``k_norm``."""
    k_norm: Norm | None
    sinks: FloatArray | None = None
    """[num_q_heads]"""
    attention_output: Linear
    attention_post_norm: Norm | None = None
    mlp_norm: Norm | None
    gate_up: Linear | None
    """Gate and up; up alone where nothing is gated. None: the layer has experts alone."""
    down: Linear | None
    experts: Experts | None = None
    shared_expert: Experts | None = None
    """The one expert of a mixture, which every token takes."""
    mlp_post_norm: Norm | None = None

    @property
    def num_bytes(self) -> int:
        linears = (
            *(self.qkv, self.attention_output, self.gate_up, self.down),
            *(self.latent, self.experts, self.shared_expert),
        )
        norms = (
            *(self.attention_norm, self.attention_post_norm, self.q_norm, self.k_norm),
            *(self.mlp_norm, self.mlp_post_norm),
        )
        num_norm_bytes = sum(norm.num_bytes for norm in norms if norm is not None)
        return sum(linear.num_bytes for linear in linears if linear is not None) + num_norm_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights of a decoder; norms and biases are float32.

    ``embedding`` [vocab, hidden] is a view of the checkpoint's file where its dtype allows: a
    token's row becomes resident when it is first read, and can be dropped again by the system, so a
    tied model holds the matrix once, packed as ``head``.
    """

    embedding: Table
    positions: Table | None = None
    token_types: npt.NDArray[np.generic] | None = None
    relative_bias: FloatArray | None = None
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


def is_transposed(spec: DecoderSpec, name: str) -> bool:
    """Whether a checkpoint has a matrix as [inputs, outputs]."""
    return spec.names.transposed and name.startswith(spec.names.layer.partition("{")[0])


def answer_matrix(spec: DecoderSpec) -> str:
    """The tensor whose rows give the logits of tokens."""
    return spec.names.embedding if spec.tied_head else f"{spec.names.head}.weight"


def qk_norm_tensors(name: str, num_heads: int) -> list[str]:
    """Names of the tensors that ``name`` stands for: where it has ``{head}``, one for each."""
    return list(dict.fromkeys(name.format(head=head) for head in range(num_heads)))
