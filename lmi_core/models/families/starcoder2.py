"""StarCoder2: LayerNorms and ungated MLPs with biases."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    bias = config.boolean("use_bias", True)
    window = config.optional_integer("sliding_window") or 0
    attention = attention_spec(
        config,
        num_kv_heads=config.integer("num_key_value_heads", 2),
        windows=(window,) * config.num_layers,
        bias=bias,
    )
    return decoder_spec(
        config,
        "starcoder2",
        attention,
        max_positions=4096,
        activation="gelu_pytorch_tanh",
        tied=True,
        norm=norm_spec(config, eps=1e-5, kind="layer", bias=True),
        mlp_bias=bias,
        names=WeightNames(gate="", up="mlp.c_fc", down="mlp.c_proj"),
    )


FAMILY = Family(name="starcoder2", read_spec=read_spec, keys={"rms_norm_eps": "norm_epsilon"})
