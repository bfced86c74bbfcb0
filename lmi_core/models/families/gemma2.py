"""Gemma 2: norms on both sides, a window in every other layer, soft caps."""

from __future__ import annotations

from typing import Any

from lmi_core.models.families.gemma import KEYS, gemma_attention, gemma_decoder
from lmi_core.models.family import Family, local_layers, local_windows
from lmi_core.models.spec import AttentionSpec, DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    attention_post_norm="post_attention_layernorm.weight",
    mlp_norm="pre_feedforward_layernorm.weight",
    mlp_post_norm="post_feedforward_layernorm.weight",
)


def windowed_attention(config: HfConfig, local: tuple[bool, ...], **changes: Any) -> AttentionSpec:
    """Attention with a window in the layers that are ``local``; ``changes``: fields of the spec."""
    return gemma_attention(
        config,
        num_kv_heads=config.integer("num_key_value_heads", 4),
        windows=local_windows(config, local, 4096),
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        **changes,
    )


def read_spec(config: HfConfig) -> DecoderSpec:
    cap = config.optional_number("attn_logit_softcapping", 50.0)
    return gemma_decoder(
        config,
        "gemma2",
        windowed_attention(config, local_layers(config, 2), soft_cap=cap),
        max_positions=8192,
        logit_soft_cap=config.optional_number("final_logit_softcapping", 30.0),
        names=NAMES,
    )


FAMILY = Family(name="gemma2", read_spec=read_spec, keys=KEYS)
