"""BLOOM: ALiBi, LayerNorms with biases, one of them after the embedding."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.families.falcon import NAMES as FALCON
from lmi_core.models.family import Family, alibi_slopes, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig

NAMES = replace(FALCON, embedding_norm="transformer.word_embeddings_layernorm.weight")


def read_spec(config: HfConfig) -> DecoderSpec:
    config.require("apply_residual_connection_post_layernorm", False)
    heads = config.integer("num_attention_heads")
    attention = attention_spec(config, num_kv_heads=heads, bias=True, slopes=alibi_slopes(heads))
    return decoder_spec(
        config,
        "bloom",
        attention,
        intermediate_size=4 * config.integer("hidden_size"),
        max_positions=2048,
        activation="gelu_pytorch_tanh",
        tied=True,
        norm=norm_spec(config, eps=1e-5, kind="layer", bias=True),
        mlp_bias=True,
        names=NAMES,
    )


FAMILY = Family(
    name="bloom",
    read_spec=read_spec,
    keys={
        "hidden_size": "n_embed",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "seq_length",
        "rms_norm_eps": "layer_norm_epsilon",
    },
)
