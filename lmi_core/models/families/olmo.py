"""OLMo 1: LayerNorms without weights."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec
from lmi_core.models.spec import DecoderSpec, NormSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    clip = config.optional_number("clip_qkv", 0.0)
    attention = attention_spec(config, bias="attention_bias", clip=clip)
    norm = NormSpec(kind="layer", eps=1e-5, has_weight=False)
    return decoder_spec(config, "olmo", attention, max_positions=2048, norm=norm)


FAMILY = Family(name="olmo", read_spec=read_spec)
