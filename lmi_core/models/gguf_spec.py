"""What is other in a GGUF file than in the checkpoint that it was made of.

Format: llama.cpp's converters and the names of tensors in its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lmi_core.models.spec import AttentionSpec, DecoderSpec, ExpertSpec
from lmi_core.models.weight_names import ExpertNames, LatentNames, WeightNames
from lmi_core.weights.gguf.architectures import INTERLEAVED
from lmi_core.weights.safetensors_file import TensorInfo

_FIRST = "blk.0."
_KV_B, _KV_B_PARTS = "attn_kv_b.weight", ("attn_k_b.weight", "attn_v_b.weight")
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Read with the settings."""


def gguf_spec(
    spec: DecoderSpec, architecture: str, tensors: Mapping[str, TensorInfo]
) -> DecoderSpec:
    """``spec``, of a checkpoint of ``architecture``, for its tensors in a GGUF file.

    Tensors tell which biases there are. Converters have put fused heads in blocks, turned matrices
    the usual way and added up weights of norms; of some families, they have put rows of queries and
    keys into the order of interleaved rotation.
    """
    attention = replace(
        _latent(spec.attention, tensors),
        qkv_bias=any(f"{_FIRST}{name}.bias" in tensors for name in ("attn_q", "attn_qkv")),
        output_bias=f"{_FIRST}attn_output.bias" in tensors,
        interleaved=spec.attention.interleaved or architecture in INTERLEAVED,
    )
    names = _names(spec.names, tensors)
    return replace(
        spec,
        attention=attention,
        gated=spec.gated or bool(names.gate),
        experts=None if spec.experts is None else _experts(spec.experts, tensors),
        norm=replace(spec.norm, offset=0.0, bias="output_norm.bias" in tensors),
        mlp_bias=f"{_FIRST}ffn_up.bias" in tensors,
        head_bias="output.bias" in tensors,
        tied_head="output.weight" not in tensors,
        names=names,
    )


def _latent(attention: AttentionSpec, tensors: Mapping[str, TensorInfo]) -> AttentionSpec:
    """Keys and values are made of one tensor in files of before May 2025; some have both forms."""
    if attention.latent is None:
        return attention
    is_whole = f"{_FIRST}{_KV_B}" in tensors
    names = LatentNames(
        q="attn_q",
        q_a="attn_q_a",
        q_a_norm="attn_q_a_norm.weight",
        q_b="attn_q_b",
        kv_a="attn_kv_a_mqa",
        kv_a_norm="attn_kv_a_norm.weight",
        kv_b=(_KV_B,) if is_whole else _KV_B_PARTS,
    )
    return replace(attention, latent=replace(attention.latent, names=names))


def _experts(experts: ExpertSpec, tensors: Mapping[str, TensorInfo]) -> ExpertSpec:
    """Of files of before 2024, a tensor for each; else all in one, maybe gate and up together."""
    in_file = tuple(f"blk.{i}.ffn_gate_inp.weight" in tensors for i in range(len(experts.sparse)))
    sparse = in_file if any(in_file) else experts.sparse
    prefix = f"blk.{sparse.index(True)}."
    is_one_each = f"{prefix}ffn_gate.0.weight" in tensors
    form = "ffn_{}.{{expert}}" if is_one_each else "ffn_{}_exps.weight"
    gate, up, down = (form.format(part) for part in ("gate", "up", "down"))
    shared = "ffn_gate_inp_shexp" if experts.names.shared_router else ""
    fused = "ffn_gate_up_exps.weight"
    return replace(
        experts,
        sparse=sparse,
        layout="each" if is_one_each else "merged" if prefix + fused in tensors else "stacked",
        router_bias=f"{prefix}ffn_gate_inp.bias" in tensors,
        bias=f"{prefix}ffn_gate_exps.bias" in tensors,
        names=ExpertNames(
            router="ffn_gate_inp",
            choice_bias="exp_probs_b.bias",
            gate=gate,
            up=up,
            down=down,
            merged_gate_up=fused,
            merged_down=down,
            shared_gate="ffn_gate_shexp",
            shared_up="ffn_up_shexp",
            shared_down="ffn_down_shexp",
            shared_router=shared,
        ),
    )


def _names(names: WeightNames, tensors: Mapping[str, TensorInfo]) -> WeightNames:
    has_gate = any(name.endswith(".ffn_gate.weight") for name in tensors)
    has_qkv = f"{_FIRST}attn_qkv.weight" in tensors
    has_two_norms = f"{_FIRST}attn_norm_2.weight" in tensors
    first, second = ("attn_norm_2", "attn_norm") if has_two_norms else ("attn_norm", "ffn_norm")
    if not names.attention_post_norm and f"{_FIRST}post_attention_norm.weight" in tensors:
        second = "post_attention_norm"
    if f"{_FIRST}attn_output_norm.weight" in tensors:
        second = "attn_output_norm"
    return WeightNames(
        embedding="token_embd.weight",
        positions="position_embd.weight" if names.positions else "",
        embedding_norm="token_embd_norm.weight" if names.embedding_norm else "",
        final_norm="output_norm.weight",
        head="output",
        layer="blk.{layer}.",
        sinks="attn_sinks.weight" if names.sinks else "",
        attention_norm=f"{first}.weight" if names.attention_norm else "",
        q="attn_q",
        k="attn_k",
        v="attn_v",
        qkv="attn_qkv" if has_qkv else "",
        q_norm="attn_q_norm.weight",
        k_norm="attn_k_norm.weight",
        attention_output="attn_output",
        attention_post_norm="post_attention_norm.weight" if names.attention_post_norm else "",
        mlp_norm=f"{second}.weight" if names.mlp_norm else "",
        gate="ffn_gate" if has_gate else "",
        up="ffn_up",
        gate_up="ffn_up" if names.gate_up or (names.gate and not has_gate) else "",
        down="ffn_down",
        mlp_post_norm="post_ffw_norm.weight" if names.mlp_post_norm else "",
        ignored=_COMPUTED + _KV_B_PARTS * (f"{_FIRST}{_KV_B}" in tensors),
        ignored_layers=names.ignored_layers,
    )
