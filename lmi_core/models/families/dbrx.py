"""DBRX: clipped queries, keys and values; LayerNorms without biases; a mixture in every layer,
whose experts lie in three tensors."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.family import Family, attention_spec, decoder_spec, expert_spec
from lmi_core.models.rope import rope_spec
from lmi_core.models.spec import DecoderSpec, NormSpec
from lmi_core.models.weight_names import ExpertNames, WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    embedding="transformer.wte.weight",
    final_norm="transformer.norm_f.weight",
    layer="transformer.blocks.{layer}.",
    attention_norm="norm_attn_norm.norm_1.weight",
    qkv="norm_attn_norm.attn.Wqkv",
    attention_output="norm_attn_norm.attn.out_proj",
    mlp_norm="norm_attn_norm.norm_2.weight",
)
_MLP = "ffn.experts.mlp."
EXPERTS = ExpertNames(router="ffn.router.layer", gate=f"{_MLP}w1", up=f"{_MLP}v1", down=f"{_MLP}w2")
KEYS = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
KEYS |= {"max_position_embeddings": "max_seq_len"}
_FFN_KEYS = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_top_k"}
_FFN_KEYS |= {"moe_intermediate_size": "ffn_hidden_size"}
_SHARES = "moe_normalize_expert_weights"


def read_spec(config: HfConfig) -> DecoderSpec:
    own = {key: config.settings(key) for key in ("attn_config", "ffn_config")}
    attn = replace(config, values=own["attn_config"], keys={})
    ffn = replace(config, values={**config.values, **own["ffn_config"]}, keys=KEYS | _FFN_KEYS)
    if ffn.get(_SHARES, 1) not in (None, 1):
        ffn.require(_SHARES, 1)
    heads, clip = attn.integer("kv_n_heads", 1), attn.optional_number("clip_qkv", 0.0)
    attention = attention_spec(config, num_kv_heads=heads, clip=clip)
    normalizes = ffn.get(_SHARES, 1) is not None
    inner = {"num_experts": 4, "top_k": 1, "intermediate_size": 3584, "normalizes": normalizes}
    experts = expert_spec(ffn, **inner, layout="stacked_rows", names=EXPERTS)
    positions, theta = config.integer("max_seq_len", 2048), attn.number("rope_theta", 10000.0)
    rope = rope_spec(config, attention.head_dim, positions, theta_default=theta)
    return decoder_spec(
        config,
        "dbrx",
        attention,
        max_positions=positions,
        ropes=(rope,) * config.num_layers,
        activation=ffn.settings("ffn_act_fn").get("name", "silu"),
        intermediate_size=experts.intermediate_size,
        norm=NormSpec(kind="layer", eps=1e-5),
        experts=experts,
        names=NAMES,
    )


FAMILY = Family(name="dbrx", read_spec=read_spec, keys=KEYS)
