"""The demo model as a torch module, with the parameter names of a Hugging Face Llama checkpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network; the defaults are those of the committed model."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    mlp_size: int = 768
    max_positions: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


def rotary_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[max_positions, head_size]`; both halves of a head rotate together."""
    exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float32) / shape.head_size
    angles = torch.outer(torch.arange(shape.max_positions), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to `x` `[batch, heads, tokens, head_size]`."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        q_size, kv_size = (n * shape.head_size for n in (shape.num_heads, shape.num_kv_heads))
        self.q_proj = nn.Linear(shape.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix `x` `[batch, tokens, hidden]` along tokens."""
        batch, tokens, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, tokens, -1, self.shape.head_size).transpose(1, 2)

        q = rotate(heads(self.q_proj(x)), cos, sin)
        k = rotate(heads(self.k_proj(x)), cos, sin)
        v = heads(self.v_proj(x))
        group = self.shape.num_heads // self.shape.num_kv_heads
        k, v = (y.repeat_interleave(group, dim=1) for y in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return out


class Mlp(nn.Module):
    """Gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token of `x` `[..., hidden]` on its own."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer: attention and feed-forward, each behind a norm and a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map `x` `[batch, tokens, hidden]` to the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Network(nn.Module):
    """The decoder with a tied output head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        cos, sin = rotary_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset()

    def reset(self) -> None:
        """Draw initial weights: scaled normals, residual outputs shrunk by depth."""
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        for name, weight in self.layers.named_parameters():
            if weight.ndim == 2:
                std = weight.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= math.sqrt(2 * self.shape.num_layers)
                nn.init.normal_(weight, std=std)

    def hidden(self, ids: Tensor) -> Tensor:
        """Normed hidden states `[batch, tokens, hidden]` of `ids` `[batch, tokens]`."""
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `[batch, tokens, vocab]` of the token after each of `ids` `[batch, tokens]`."""
        return self.logits(self.hidden(ids))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits `[..., vocab]` of normed hidden states `[..., hidden]`."""
        return F.linear(hidden, self.embed_tokens.weight)
