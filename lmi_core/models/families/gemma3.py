"""Gemma 3: query and key norms; five local layers for one that sees everything."""

from __future__ import annotations

from lmi_core.models.families.gemma2 import NAMES
from lmi_core.models.family import (
    Family,
    attention_spec,
    decoder_spec,
    default_head_dim,
    local_layers,
    local_windows,
    norm_spec,
    ropes_by_type,
)
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    if config.get("use_bidirectional_attention"):
        raise config.error("use_bidirectional_attention", "is true, but text is generated causally")
    local = local_layers(config, config.integer("sliding_window_pattern", 6))
    bias = config.boolean("attention_bias")
    attention = attention_spec(
        config,
        num_kv_heads=config.integer("num_key_value_heads", 4),
        head_dim=default_head_dim(config, 256),
        qkv_bias=bias,
        output_bias=bias,
        windows=local_windows(config, local, 4096),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=config.optional_number("attn_logit_softcapping", 0.0),
        qk_norm="head",
    )
    return decoder_spec(
        config,
        "gemma3",
        attention,
        max_positions=131072,
        ropes=ropes_by_type(config, attention, local, 131072, thetas=(10000.0, 1000000.0)),
        activation="gelu_pytorch_tanh",
        tied=True,
        norm=norm_spec(config, offset=1.0),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        rounds_embedding_scale=True,
        logit_soft_cap=config.optional_number("final_logit_softcapping", 0.0),
        names=NAMES,
    )


FAMILY = Family(
    name="gemma3",
    read_spec=read_spec,
    keys={"hidden_act": "hidden_activation"},
)
