"""Llama 1, 2 and 3 and the many models that share their architecture."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    attention = attention_spec(config, bias="attention_bias")
    return decoder_spec(
        config, "llama", attention, max_positions=2048, mlp_bias=config.boolean("mlp_bias")
    )


FAMILY = Family(name="llama", read_spec=read_spec)
