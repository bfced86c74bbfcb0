"""DeepSeek-V2: latent attention; mixtures of experts from the best groups, beside shared ones."""

from __future__ import annotations

from typing import Any

from lmi_core.models.family import Family, attention_spec, decoder_spec, expert_spec
from lmi_core.models.rope import rope_spec, yarn_score_scale
from lmi_core.models.spec import DecoderSpec, ExpertSpec, LatentSpec
from lmi_core.weights.hf_config import HfConfig

KEYS = {"num_experts": "n_routed_experts"}


def read_spec(config: HfConfig) -> DecoderSpec:
    config.require("norm_topk_prob", False)
    is_grouped = config.get("topk_method") == "group_limited_greedy"
    inner = config.integer("moe_intermediate_size", 1407)
    experts = expert_spec(
        config,
        num_experts=64,
        top_k=6,
        intermediate_size=inner,
        num_dense=config.integer("first_k_dense_replace", 0, minimum=0),
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=config.integer("n_group", 1) if is_grouped else 1,
        top_groups=config.integer("topk_group", 1) if is_grouped else 1,
        shared_size=inner * config.integer("n_shared_experts", 2, minimum=0),
    )
    return deepseek(config, "deepseek_v2", experts, max_positions=2048)


def deepseek(config: HfConfig, family: str, experts: ExpertSpec, **changes: Any) -> DecoderSpec:
    """With latent attention; ``changes``: of ``decoder_spec``."""
    bias = config.boolean("attention_bias")
    latent = LatentSpec(
        q_rank=config.optional_integer("q_lora_rank", 1536) or 0,
        kv_rank=config.integer("kv_lora_rank", 512),
        nope_dim=config.integer("qk_nope_head_dim", 128),
        rope_dim=config.integer("qk_rope_head_dim", 64),
        value_dim=config.integer("v_head_dim", 128),
        bias=bias,
    )
    if latent.kv_rank % 2:
        raise config.error("kv_lora_rank", f"is {latent.kv_rank}, but must be even")
    positions = config.integer("max_position_embeddings", changes["max_positions"])
    rope = rope_spec(config, latent.rope_dim, positions)
    attention = attention_spec(
        config,
        num_kv_heads=1,
        head_dim=latent.rope_dim + latent.kv_rank,
        scale=(latent.nope_dim + latent.rope_dim) ** -0.5 * yarn_score_scale(config, rope),
        output_bias=bias,
        latent=latent,
    )
    ropes = (rope,) * config.num_layers
    return decoder_spec(config, family, attention, ropes=ropes, experts=experts, **changes)


FAMILY = Family(name="deepseek_v2", read_spec=read_spec, keys=KEYS)
