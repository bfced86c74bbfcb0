"""Phi-1, 1.5 and 2: attention and MLP side by side after one LayerNorm, biases everywhere."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    final_norm="model.final_layernorm.weight",
    q_norm="self_attn.q_layernorm.weight",
    k_norm="self_attn.k_layernorm.weight",
    attention_output="self_attn.dense",
    mlp_norm="",
    gate="",
    up="mlp.fc1",
    down="mlp.fc2",
)


def read_spec(config: HfConfig) -> DecoderSpec:
    attention = attention_spec(
        config,
        bias=True,
        qk_norm="layer" if config.boolean("qk_layernorm") else "",
    )
    return decoder_spec(
        config,
        "phi",
        attention,
        max_positions=2048,
        partial_rotary=0.5,
        activation="gelu_new",
        norm=norm_spec(config, eps=1e-5, kind="layer", bias=True),
        mlp_bias=True,
        head_bias=True,
        parallel=True,
        names=NAMES,
    )


FAMILY = Family(name="phi", read_spec=read_spec, keys={"rms_norm_eps": "layer_norm_eps"})
