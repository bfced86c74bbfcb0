"""OLMo 2: norms of what layers add, and of all query and key heads together."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    attention_norm="",
    attention_post_norm="post_attention_layernorm.weight",
    mlp_norm="",
    mlp_post_norm="post_feedforward_layernorm.weight",
)


def read_spec(config: HfConfig) -> DecoderSpec:
    attention = attention_spec(config, bias="attention_bias", qk_norm="row")
    norm = norm_spec(config, eps=1e-5)
    return decoder_spec(config, "olmo2", attention, max_positions=2048, norm=norm, names=NAMES)


FAMILY = Family(name="olmo2", read_spec=read_spec)
