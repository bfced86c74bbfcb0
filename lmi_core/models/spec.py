"""What a decoder looks like, derived from a checkpoint's configuration by its family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions, rotate-half form; parameters that ``kind`` doesn't use are ignored."""

    rotary_dim: int
    """Leading dimensions of a head that are rotated; even."""
    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    """Positions before scaling (dynamic, yarn, llama3)."""
    attention_factor: float = 1.0
    """Scale of cos and sin (yarn)."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Heads, scale and windows of all layers; query heads share KV heads in groups."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """RMS norm of every query and key head before rotation."""
    windows: tuple[int, ...] = ()
    """Per layer, the keys a query sees counting its own; 0: all."""

    @property
    def q_size(self) -> int:
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Everything that the decoder and the loader need to know besides the weights."""

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    norm_eps: float
    activation: Activation
    attention: AttentionSpec
    rope: RopeSpec
    tied_head: bool
    mlp_bias: bool = False
    max_positions: int
    """Longest context the model is made for, rope scaling included."""
