"""What a checkpoint calls the weights of a decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

QkvLayout = Literal["blocks", "grouped", "codegen"]
"""How a fused tensor holds heads: all queries, then keys, then values; for each KV head its
queries, key and value; or CodeGen's four shards of queries, values and keys."""


ExpertLayout = Literal[
    "each", "each_in_turns", "merged", "interleaved", "mxfp4", "stacked", "stacked_rows"
]
"""How a checkpoint holds experts: a linear for each matrix of each of them; or one for the down of
each and one for its gate and up, in turns; or all in one tensor
[experts, 2 inner, hidden] of gate and up, and one [experts, hidden, inner] of down; or those
[experts, hidden, 2 inner] and [experts, inner, hidden], gate and up in turns; or the same, not
transposed, as blocks of 32 floats of 4 bits, two in a byte, and their scales; or three tensors:
[experts, inner, hidden] of gate, of up, and [experts, hidden, inner] of down; or all three
[experts inner, hidden]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a mixture's weights in a layer, linears without ``.weight``; ``{expert}`` is filled
    in. "": there is no such weight. Merged tensors are named in whole."""

    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    gate: str = "mlp.experts.{expert}.gate_proj"
    up: str = "mlp.experts.{expert}.up_proj"
    down: str = "mlp.experts.{expert}.down_proj"
    merged_gate_up: str = "mlp.experts.gate_up_proj"
    merged_down: str = "mlp.experts.down_proj"
    shared_gate: str = "mlp.shared_experts.gate_proj"
    shared_up: str = "mlp.shared_experts.up_proj"
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_router: str = ""
    """What the shared expert's sigmoid is of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentNames:
    """Names of latent attention's weights in a layer, linears without ``.weight``."""

    q: str = "self_attn.q_proj"
    """Of the stream, where queries have no latent."""
    q_a: str = "self_attn.q_a_proj"
    q_a_norm: str = "self_attn.q_a_layernorm.weight"
    q_b: str = "self_attn.q_b_proj"
    kv_a: str = "self_attn.kv_a_proj_with_mqa"
    kv_a_norm: str = "self_attn.kv_a_layernorm.weight"
    kv_b: tuple[str, ...] = ("self_attn.kv_b_proj.weight",)
    """Tensors: one [heads (nope + value), rank], or that of keys [heads, rank, nope] and that of
    values [heads, value, rank]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Names of our weights; those of a layer follow ``layer`` with its index filled in. "": the
    model has no such weight.

    Linear layers are named without ``.weight`` and ``.bias``. ``ignored`` are endings of tensors
    that older checkpoints carry and that are computed instead.
    """

    embedding: str = "model.embed_tokens.weight"
    positions: str = ""
    """Learned embeddings of positions."""
    token_types: str = ""
    relative_bias: str = ""
    """By bucket and head."""
    embedding_norm: str = ""
    project_in: str = ""
    """A linear from embeddings to the stream, where they differ in size."""
    project_out: str = ""
    """From the stream to what the head reads."""
    final_norm: str = "model.norm.weight"
    head: str = "lm_head"
    layer: str = "model.layers.{layer}."
    sinks: str = ""
    """A score of each head that has no value."""
    attention_norm: str = "input_layernorm.weight"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str = ""
    """One tensor instead of q, k and v, in ``qkv_layout``."""
    qkv_layout: QkvLayout = "blocks"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    attention_output: str = "self_attn.o_proj"
    attention_post_norm: str = ""
    """Of what attention adds."""
    mlp_norm: str = "post_attention_layernorm.weight"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str = ""
    """One tensor instead of gate and up."""
    down: str = "mlp.down_proj"
    mlp_post_norm: str = ""
    transposed: bool = False
    """Matrices of layers are [inputs, outputs]."""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    ignored_layers: int = 0
    """Layers after the last, which predict further tokens while training."""
