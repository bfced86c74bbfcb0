"""Gemma 1: (1 + w) norms, embeddings times the root of their size."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.family import Family, attention_spec, decoder_spec, default_head_dim, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    # Early files say gelu and mean its approximation, which the models were trained with.
    values = {key: value for key, value in config.values.items() if key != "hidden_act"}
    bias = config.boolean("attention_bias")
    attention = attention_spec(
        config, head_dim=default_head_dim(config, 256), qkv_bias=bias, output_bias=bias
    )
    return decoder_spec(
        replace(config, values=values),
        "gemma",
        attention,
        max_positions=8192,
        activation="gelu_pytorch_tanh",
        tied=True,
        norm=norm_spec(config, offset=1.0),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        rounds_embedding_scale=True,
    )


FAMILY = Family(
    name="gemma",
    read_spec=read_spec,
    keys={"hidden_act": "hidden_activation"},
)
