"""gpt-oss: experts with clamped activations and biases, published as MXFP4; attention sinks, and a
window in every other layer."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.family import (
    Family,
    attention_spec,
    decoder_spec,
    expert_spec,
    local_layers,
    local_windows,
    norm_spec,
)
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import ExpertNames, WeightNames
from lmi_core.weights.hf_config import HfConfig

KEYS = {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}
_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
_ROPE |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def read_spec(config: HfConfig) -> DecoderSpec:
    if config.values.get("rope_parameters") is None and not config.values.get("rope_scaling"):
        config = replace(config, values={**config.values, "rope_parameters": _ROPE})
    config.require("swiglu_limit", 7.0)
    config.require("swiglu_alpha", 1.702)
    attention = attention_spec(
        config,
        num_kv_heads=config.integer("num_key_value_heads", 8),
        head_dim=config.head_dim(64),
        windows=local_windows(config, local_layers(config, 2), 128),
        bias=config.boolean("attention_bias", True),
    )
    experts = expert_spec(
        config,
        num_experts=128,
        top_k=4,
        normalizes=True,
        router_bias=True,
        bias=True,
        activation="clamped_swiglu",
        layout="interleaved",
        names=ExpertNames(router="mlp.router", gate="", up="", down=""),
    )
    return decoder_spec(
        config,
        "gpt_oss",
        attention,
        theta=150000.0,
        max_positions=131072,
        norm=norm_spec(config, eps=1e-5),
        experts=experts,
        names=WeightNames(sinks="self_attn.sinks"),
    )


FAMILY = Family(name="gpt_oss", read_spec=read_spec, keys=KEYS)
