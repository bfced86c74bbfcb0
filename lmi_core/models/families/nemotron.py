"""Nemotron: (1 + w) LayerNorms, half of each head rotated, squared ReLUs without gates."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    attention = attention_spec(config, bias="attention_bias")
    return decoder_spec(
        config,
        "nemotron",
        attention,
        max_positions=4096,
        partial_rotary=0.5,
        activation="relu2",
        norm=norm_spec(config, eps=1e-5, kind="layer", bias=True, offset=1.0),
        mlp_bias=config.boolean("mlp_bias"),
        names=WeightNames(gate=""),
    )


FAMILY = Family(
    name="nemotron",
    read_spec=read_spec,
    keys={"rms_norm_eps": "norm_eps"},
)
