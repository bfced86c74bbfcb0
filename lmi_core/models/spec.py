"""What a decoder looks like, derived from a checkpoint's configuration by its family, and what its
linears are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from lmi_core.models.pooling_head import HeadLayer
from lmi_core.models.weight_names import (
    ExpertLayout,
    ExpertNames,
    LatentNames,
    QkvLayout,
    WeightNames,
)

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_swiglu"]
NormKind = Literal["rms", "layer"]
QkNorm = Literal["", "head", "row", "layer", "layers"]
"""Of queries and keys before rotation: none; RMS of every head, by one weight; RMS of all heads
together; LayerNorm of every head, by one weight and bias, or by a weight for each."""
Scoring = Literal["softmax", "sigmoid", "sparsemixer"]
RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope", "none"]
RowIds = npt.NDArray[np.int64]
CODEGEN_SHARDS = 4
"""Each of a quarter of the heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions, rotate-half form; parameters that ``kind`` doesn't use are ignored.

    ``none``: nothing is rotated."""

    rotary_dim: int
    """Leading dimensions of a head that are rotated; even."""
    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    """Positions before scaling (dynamic, yarn, llama3, longrope)."""
    attention_factor: float = 1.0
    """Scale of cos and sin (yarn, longrope)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()
    """What each frequency is divided by in contexts up to the original length (longrope)."""
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention: keys and values of all heads are made of one latent."""

    q_rank: int
    """Of what queries are made of; 0: of the stream itself."""
    kv_rank: int
    nope_dim: int
    """Dimensions of a head that aren't rotated."""
    rope_dim: int
    value_dim: int
    bias: bool = False
    """Of the linears to the latents."""
    names: LatentNames = field(default_factory=LatentNames)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Heads, scale and windows of all layers; query heads share KV heads in groups."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float = 0.0
    """Of scores; 0: none."""
    clip: float = 0.0
    """What queries, keys and values are clipped to behind norms; 0: nothing."""
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm = ""
    windows: tuple[int, ...] = ()
    """Per layer, the keys a query sees counting its own; 0: all."""
    slopes: tuple[float, ...] = ()
    """What each query head's scores grow by per position towards the query (ALiBi)."""
    relative_buckets: int = 0
    """Of a bias by the distance of a key, which all layers share (T5's); 0: there is none."""
    relative_distance: int = 128
    """From which on keys share a bucket."""
    interleaved: bool = False
    """Neighbouring dimensions are rotated together: the checkpoint's order of a head's dimensions,
    which loading changes to that of the rotate-half form."""
    latent: LatentSpec | None = None
    """``head_dim`` and ``num_kv_heads`` are those of the latent space then: rotary part and latent,
    and 1."""

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def output_size(self) -> int:
        """Of what the output's linear reads."""
        head_dim = self.head_dim if self.latent is None else self.latent.value_dim
        return self.num_q_heads * head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSpec:
    """The mixtures of experts that layers have instead of an MLP, or beside a shared one; routing
    as ``ops.route`` says. Experts are gated."""

    num_experts: int
    top_k: int
    intermediate_size: int
    sparse: tuple[bool, ...]
    """Which layers have one; others have the MLP."""
    scoring: Scoring = "softmax"
    normalizes: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    threshold: float = 0.0
    choice_bias: bool = False
    """A bias of each expert for the choice alone."""
    router_bias: bool = False
    bias: bool = False
    """Of experts' matrices."""
    shared_size: int = 0
    """Inner size of the shared expert, which every token takes; 0: none."""
    gates_shared: bool = False
    """Its output is multiplied by a sigmoid."""
    activation: Activation | None = None
    """None: the MLP's."""
    layout: ExpertLayout = "each"
    names: ExpertNames = field(default_factory=ExpertNames)


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """Norms of layers, and the last one."""

    kind: NormKind = "rms"
    eps: float
    bias: bool = False
    has_weight: bool = True
    offset: float = 0.0
    """Added to the checkpoint's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Everything that the decoder and the loader need to know besides the weights."""

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    norm: NormSpec
    activation: Activation
    attention: AttentionSpec
    ropes: tuple[RopeSpec, ...]
    """Of each layer."""
    tied_head: bool
    is_causal: bool = True
    """A token sees those before it; otherwise all of its sequence."""
    gated: bool = True
    """The MLP multiplies its activation by a second projection."""
    mlp_bias: bool = False
    head_bias: bool = False
    normed_head: bool = False
    """The head's rows are divided by their lengths."""
    parallel: bool = False
    """Attention and MLP read the same stream and add to it together."""
    norms_stream: bool = False
    """Norms don't read the stream for a linear, but replace it after each sum."""
    embedding_size: int = 0
    """0: ``hidden_size``."""
    num_positions: int = 0
    """Rows of the table of learned positions, ``position_offset`` included."""
    position_offset: int = 0
    """The row of the first position."""
    num_token_types: int = 0
    """Rows of the table of a token's text in a pair."""
    first_layer_normed: bool = False
    """The first layer's attention reads the embedding, which is normed, as it is."""
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    """To bf16, where the model is."""
    has_head: bool = True
    """Logits; without, the last hidden states are what the model gives."""
    head_layers: tuple[HeadLayer, ...] = ()
    """Behind what is pooled of them."""
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    max_positions: int
    """Longest context the model is made for, rope scaling included."""
    experts: ExpertSpec | None = None
    notes: tuple[str, ...] = ()
    """What of the model is served otherwise than config.json says, for people."""
    names: WeightNames = field(default_factory=WeightNames)

    @property
    def num_cache_layers(self) -> int:
        """Layers of the KV cache: one that all share where no later step reads it."""
        return self.num_layers if self.is_causal else 1


class LayerLinear(IntEnum):
    """The linears of a layer, in order; GATE_UP is up alone where nothing is gated."""

    QKV = 0
    ATTENTION_OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


@dataclass(frozen=True, slots=True)
class LinearSource:
    """Modules whose outputs, one after the other, are those of one of our linears."""

    modules: tuple[tuple[str, int], ...]
    """Names within the layer, and outputs."""
    num_inputs: int
    bias: bool
    rows: RowIds | None = None
    """The checkpoint's output for each of ours; None: as they are."""

    @property
    def num_outputs(self) -> int:
        return sum(size for _, size in self.modules)

    def module_rows(self, first: int, size: int) -> RowIds | None:
        """``rows`` of the module with these outputs; no row leaves its module."""
        return None if self.rows is None else self.rows[first : first + size] - first


def layer_linears(spec: DecoderSpec, layer_id: int) -> dict[LayerLinear, LinearSource]:
    """Of a layer, but for latent attention's and experts'. One that all tokens take unscaled is an
    MLP."""
    attention, names = spec.attention, spec.names
    hidden = spec.hidden_size
    qkv: tuple[tuple[str, int], ...] = (
        (names.q, attention.q_size),
        (names.k, attention.kv_size),
        (names.v, attention.kv_size),
    )
    if names.qkv:
        qkv = ((names.qkv, attention.q_size + 2 * attention.kv_size),)
    linears = {}
    if attention.latent is None:
        rows = _qkv_rows(spec)
        linears[LayerLinear.QKV] = LinearSource(qkv, hidden, attention.qkv_bias, rows)
    return linears | {
        LayerLinear.ATTENTION_OUTPUT: LinearSource(
            ((names.attention_output, hidden),), attention.output_size, attention.output_bias
        ),
        **_mlp_linears(spec, layer_id),
    }


def latent_linears(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of latent attention's modules in a layer, but for what makes keys and
    values of a latent; nothing where attention is another."""
    latent, hidden = spec.attention.latent, spec.hidden_size
    if latent is None:
        return {}
    names, q_size = latent.names, spec.attention.num_q_heads * (latent.nope_dim + latent.rope_dim)
    found = {names.kv_a: (latent.kv_rank + latent.rope_dim, hidden)}
    if latent.q_rank:
        return found | {names.q_a: (latent.q_rank, hidden), names.q_b: (q_size, latent.q_rank)}
    return found | {names.q: (q_size, hidden)}


def _mlp_linears(spec: DecoderSpec, layer_id: int) -> dict[LayerLinear, LinearSource]:
    names, inner = spec.names, spec.intermediate_size
    gate, up, down = names.gate, names.up, names.down
    experts = spec.experts
    if experts is not None and experts.sparse[layer_id]:
        if not experts.shared_size or experts.gates_shared:
            return {}
        inner = experts.shared_size
        gate, up = experts.names.shared_gate, experts.names.shared_up
        down = experts.names.shared_down
    modules: tuple[tuple[str, int], ...] = ((up, inner),)
    if names.gate_up and gate == names.gate:
        modules = ((names.gate_up, 2 * inner),)
    elif gate:
        modules = ((gate, inner), *modules)
    return {
        LayerLinear.GATE_UP: LinearSource(modules, spec.hidden_size, spec.mlp_bias),
        LayerLinear.DOWN: LinearSource(((down, spec.hidden_size),), inner, spec.mlp_bias),
    }


def rotate_half_order(spec: DecoderSpec) -> RowIds | None:
    """The checkpoint's dimension of a head for each of ours; None: the same."""
    if not spec.attention.interleaved:
        return None
    rotary_dim = max(rope.rotary_dim for rope in spec.ropes)
    pairs = np.arange(rotary_dim).reshape(-1, 2)
    return np.concatenate([pairs.T.ravel(), np.arange(rotary_dim, spec.attention.head_dim)])


def _qkv_rows(spec: DecoderSpec) -> RowIds | None:
    attention, order = spec.attention, rotate_half_order(spec)
    layout = spec.names.qkv_layout
    if order is None and layout == "blocks":
        return None
    heads = (attention.num_q_heads, attention.num_kv_heads, attention.num_kv_heads)
    parts = _heads(layout, heads, attention.head_dim)
    if order is not None:
        parts = [parts[0][:, order], parts[1][:, order], parts[2]]
    return np.concatenate([part.ravel() for part in parts])


def _heads(layout: QkvLayout, heads: tuple[int, int, int], head_dim: int) -> list[RowIds]:
    """Rows [heads, head_dim] of queries, keys and values in a fused tensor."""
    num_q, num_kv, _ = heads
    rows = np.arange(sum(heads) * head_dim)
    if layout == "grouped":
        groups = rows.reshape(num_kv, -1, head_dim)
        parts = [groups[:, :-2], groups[:, -2], groups[:, -1]]
    elif layout == "codegen":
        shards = rows.reshape(CODEGEN_SHARDS, 3, -1, head_dim)
        parts = [shards[:, 0], shards[:, 2], shards[:, 1]]
    else:
        parts = np.split(rows, [num_q * head_dim, (num_q + num_kv) * head_dim])
    return [part.reshape(-1, head_dim) for part in parts]
