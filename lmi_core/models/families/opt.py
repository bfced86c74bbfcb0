"""OPT: learned positions from the third row on; that of 350m norms its stream."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.family import Family, attention_spec, decoder_spec
from lmi_core.models.spec import DecoderSpec, NormSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

OFFSET = 2
NAMES = WeightNames(
    embedding="model.decoder.embed_tokens.weight",
    positions="model.decoder.embed_positions.weight",
    final_norm="model.decoder.final_layer_norm.weight",
    layer="model.decoder.layers.{layer}.",
    attention_norm="self_attn_layer_norm.weight",
    attention_output="self_attn.out_proj",
    mlp_norm="final_layer_norm.weight",
    gate="",
    up="fc1",
    down="fc2",
)


def read_spec(config: HfConfig) -> DecoderSpec:
    bias = config.boolean("enable_bias", True)
    norms_first = config.boolean("do_layer_norm_before", True)
    affine = config.boolean("layer_norm_elementwise_affine", True)
    heads = config.integer("num_attention_heads")
    names, columns = NAMES, config.integer("word_embed_proj_dim", config.integer("hidden_size"))
    if not norms_first or config.boolean("_remove_final_layer_norm"):
        names = replace(names, final_norm="")
    if columns != config.integer("hidden_size"):
        projections = ("model.decoder.project_in", "model.decoder.project_out")
        names = replace(names, project_in=projections[0], project_out=projections[1])
    return decoder_spec(
        config,
        "opt",
        attention_spec(config, num_kv_heads=heads, bias=bias),
        max_positions=2048,
        activation="relu",
        tied=True,
        norm=NormSpec(kind="layer", eps=1e-5, bias=affine, has_weight=affine),
        mlp_bias=bias,
        norms_stream=not norms_first,
        embedding_size=columns,
        num_positions=config.integer("max_position_embeddings", 2048) + OFFSET,
        position_offset=OFFSET,
        names=names,
    )


FAMILY = Family(
    name="opt",
    read_spec=read_spec,
    keys={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
)
