"""Phi-3.5-MoE: LayerNorms; two experts, which SparseMixer chooses and scores one by one."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.families import mixtral
from lmi_core.models.family import Family, attention_spec, decoder_spec, expert_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    config.require("num_experts_per_tok", 2)
    window = config.optional_integer("sliding_window") or 0
    attention = attention_spec(
        config,
        num_kv_heads=config.integer("num_key_value_heads", 8),
        windows=(window,) * config.num_layers,
        bias="attention_bias",
    )
    experts = expert_spec(
        config,
        num_experts=16,
        top_k=2,
        scoring="sparsemixer",
        threshold=2 * config.number("router_jitter_noise", 0.01),
        names=mixtral.NAMES,
    )
    return decoder_spec(
        with_attention_factor(config),
        "phimoe",
        attention,
        max_positions=131072,
        theta=1000000.0,
        norm=norm_spec(config, eps=1e-5, kind="layer", bias=True),
        head_bias=config.boolean("lm_head_bias"),
        experts=experts,
    )


def with_attention_factor(config: HfConfig) -> HfConfig:
    """``short_mscale`` and ``long_mscale``, which published files have alike, by its usual name."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(key) or {}
    if not isinstance(rope, dict) or "long_mscale" not in rope:
        return config
    if rope.get("short_mscale") != rope["long_mscale"]:
        raise config.error(f"{key}.short_mscale", f"must be long_mscale, {rope['long_mscale']}")
    rope = {**rope, "attention_factor": rope["long_mscale"]}
    return replace(config, values={**config.values, key: rope})


FAMILY = Family(name="phimoe", read_spec=read_spec, keys=mixtral.KEYS)
