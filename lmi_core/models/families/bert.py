"""BERT: an encoder that norms its stream, with learned positions and token types."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.pooling_head import HeadLayer
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    embedding="bert.embeddings.word_embeddings.weight",
    positions="bert.embeddings.position_embeddings.weight",
    token_types="bert.embeddings.token_type_embeddings.weight",
    embedding_norm="bert.embeddings.LayerNorm.weight",
    final_norm="",
    head="cls.predictions.decoder",
    layer="bert.encoder.layer.{layer}.",
    attention_norm="attention.output.LayerNorm.weight",
    q="attention.self.query",
    k="attention.self.key",
    v="attention.self.value",
    attention_output="attention.output.dense",
    mlp_norm="output.LayerNorm.weight",
    gate="",
    up="intermediate.dense",
    down="output.dense",
    ignored=("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"),
)


def read_spec(config: HfConfig, names: WeightNames = NAMES, offset: int = 0) -> DecoderSpec:
    """``offset``: the row of the first position."""
    config.require("position_embedding_type", "absolute")
    config.require("is_decoder", False)
    heads = config.integer("num_attention_heads")
    num_positions = config.integer("max_position_embeddings", 512)
    return decoder_spec(
        config,
        "bert",
        attention_spec(config, num_kv_heads=heads, bias=True),
        max_positions=512,
        activation="gelu",
        norm=norm_spec(config, eps=1e-12, kind="layer", bias=True),
        is_causal=False,
        norms_stream=True,
        mlp_bias=True,
        num_positions=num_positions,
        position_offset=offset,
        num_token_types=config.integer("type_vocab_size", 2) if names.token_types else 0,
        names=names,
    )


def classifier(spec: DecoderSpec, config: HfConfig) -> tuple[HeadLayer, ...]:
    size = spec.hidden_size
    pooler = HeadLayer("bert.pooler.dense", size, size, activation="tanh")
    return pooler, HeadLayer("classifier", 1, size)


KEYS = {"rms_norm_eps": "layer_norm_eps"}
FAMILY = Family(name="bert", read_spec=read_spec, keys=KEYS, classifier=classifier)
