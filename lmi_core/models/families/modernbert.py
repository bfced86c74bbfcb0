"""ModernBERT: an encoder with rotary positions and gated MLPs, whose layers see their surroundings
but for every third, which sees all."""

from __future__ import annotations

from lmi_core.models.family import (
    Family,
    attention_spec,
    decoder_spec,
    local_layers,
    norm_spec,
    ropes_by_type,
)
from lmi_core.models.pooling_head import HeadLayer
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    embedding="model.embeddings.tok_embeddings.weight",
    embedding_norm="model.embeddings.norm.weight",
    final_norm="model.final_norm.weight",
    head="decoder",
    layer="model.layers.{layer}.",
    attention_norm="attn_norm.weight",
    qkv="attn.Wqkv",
    attention_output="attn.Wo",
    mlp_norm="mlp_norm.weight",
    gate_up="mlp.Wi",
    down="mlp.Wo",
)


def read_spec(config: HfConfig) -> DecoderSpec:
    config.require("norm_bias", False)
    local = local_layers(config, config.integer("global_attn_every_n_layers", 3), first=0)
    near = config.integer("local_attention", 128) // 2 + 1
    heads = config.integer("num_attention_heads")
    attention = attention_spec(
        config,
        num_kv_heads=heads,
        windows=tuple(near if is_local else 0 for is_local in local),
        bias="attention_bias",
    )
    return decoder_spec(
        config,
        "modernbert",
        attention,
        max_positions=8192,
        ropes=ropes_by_type(config, attention, local, 8192, thetas=(10000.0, 160000.0)),
        activation="gelu",
        norm=norm_spec(config, eps=1e-5, kind="layer"),
        is_causal=False,
        first_layer_normed=True,
        mlp_bias=config.boolean("mlp_bias"),
        names=NAMES,
    )


def classifier(spec: DecoderSpec, config: HfConfig) -> tuple[HeadLayer, ...]:
    size, bias = spec.hidden_size, config.boolean("classifier_bias")
    config.require("classifier_activation", "gelu")
    dense = HeadLayer("head.dense", size, size, bias, "gelu", norm="head.norm.weight")
    return dense, HeadLayer("classifier", 1, size)


FAMILY = Family(
    name="modernbert",
    read_spec=read_spec,
    keys={
        "hidden_act": "hidden_activation",
        "rms_norm_eps": "norm_eps",
        "rope_theta": "global_rope_theta",
        "rope_local_base_freq": "local_rope_theta",
    },
    classifier=classifier,
)
