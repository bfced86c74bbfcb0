"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.family import Family, attention_spec, decoder_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    default = None if config.values.get("model_type") == "ministral3" else 4096
    window = config.optional_integer("sliding_window", default) or 0
    attention = attention_spec(
        config,
        num_kv_heads=config.integer("num_key_value_heads", 8),
        windows=(window,) * config.num_layers,
    )
    spec = decoder_spec(config, "mistral", attention, max_positions=131072)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    first = spec.ropes[0].original_max_positions
    if rope.get("llama_4_scaling_beta") and spec.max_positions > first:
        # Ministral 3 multiplies queries from there on by 1 + beta log(1 + position // first).
        note = f"llama_4_scaling_beta is not supported: contexts end at {first} tokens, before it"
        spec = replace(spec, max_positions=first, notes=(note,))
    return spec


FAMILY = Family(name="mistral", read_spec=read_spec)
