"""Qwen3 (dense): norms on query and key heads, a head size of its own."""

from __future__ import annotations

from lmi_core.models.family import (
    Family,
    attention_spec,
    decoder_spec,
    layer_windows,
)
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    attention = attention_spec(
        config,
        head_dim=config.head_dim(128),
        windows=layer_windows(config),
        bias="attention_bias",
        qk_norm="head",
    )
    return decoder_spec(config, "qwen3", attention, max_positions=32768)


FAMILY = Family(name="qwen3", read_spec=read_spec)
