"""Cohere's Command-R: attention and MLP side by side after one LayerNorm."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    attention = attention_spec(
        config,
        bias="attention_bias",
        qk_norm="layers" if config.boolean("use_qk_norm") else "",
        interleaved=True,
    )
    return decoder_spec(
        config,
        "cohere",
        attention,
        max_positions=8192,
        tied=True,
        norm=norm_spec(config, eps=1e-5, kind="layer"),
        parallel=True,
        logit_scale=config.number("logit_scale", 0.0625),
        names=WeightNames(mlp_norm=""),
    )


FAMILY = Family(
    name="cohere",
    read_spec=read_spec,
    keys={"rms_norm_eps": "layer_norm_eps"},
)
