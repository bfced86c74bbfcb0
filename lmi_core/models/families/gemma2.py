"""Gemma 2: norms on both sides, a window in every other layer, soft caps."""

from __future__ import annotations

from lmi_core.models.family import (
    Family,
    attention_spec,
    decoder_spec,
    default_head_dim,
    local_layers,
    local_windows,
    norm_spec,
)
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    attention_post_norm="post_attention_layernorm.weight",
    mlp_norm="pre_feedforward_layernorm.weight",
    mlp_post_norm="post_feedforward_layernorm.weight",
)


def read_spec(config: HfConfig) -> DecoderSpec:
    local = local_layers(config, 2)
    bias = config.boolean("attention_bias")
    attention = attention_spec(
        config,
        num_kv_heads=config.integer("num_key_value_heads", 4),
        head_dim=default_head_dim(config, 256),
        qkv_bias=bias,
        output_bias=bias,
        windows=local_windows(config, local, 4096),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=config.optional_number("attn_logit_softcapping", 50.0),
    )
    return decoder_spec(
        config,
        "gemma2",
        attention,
        max_positions=8192,
        activation="gelu_pytorch_tanh",
        tied=True,
        norm=norm_spec(config, offset=1.0),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        rounds_embedding_scale=True,
        logit_soft_cap=config.optional_number("final_logit_softcapping", 30.0),
        names=NAMES,
    )


FAMILY = Family(
    name="gemma2",
    read_spec=read_spec,
    keys={"hidden_act": "hidden_activation"},
)
