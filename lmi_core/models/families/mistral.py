"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    window = config.optional_integer("sliding_window", 4096) or 0
    attention = attention_spec(
        config,
        num_kv_heads=config.integer("num_key_value_heads", 8),
        windows=(window,) * config.num_layers,
    )
    return decoder_spec(config, "mistral", attention, max_positions=131072)


FAMILY = Family(name="mistral", read_spec=read_spec)
