"""GLM-4 of 2024: neighbouring dimensions rotated, half of them; fused gate and up."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(gate_up="mlp.gate_up_proj")


def read_spec(config: HfConfig, names: WeightNames = NAMES) -> DecoderSpec:
    attention = attention_spec(
        config,
        num_kv_heads=config.integer("num_key_value_heads", 2),
        head_dim=config.head_dim(128),
        qkv_bias=config.boolean("attention_bias", True),
        interleaved=True,
    )
    return decoder_spec(
        config,
        "glm",
        attention,
        max_positions=131072,
        partial_rotary=0.5,
        norm=norm_spec(config, eps=1.5625e-07),
        names=names,
    )


FAMILY = Family(name="glm", read_spec=read_spec)
