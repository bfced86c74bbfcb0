"""GPT-NeoX and Pythia: LayerNorms, ungated MLPs, attention and MLP side by side."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    embedding="gpt_neox.embed_in.weight",
    final_norm="gpt_neox.final_layer_norm.weight",
    layer="gpt_neox.layers.{layer}.",
    qkv="attention.query_key_value",
    qkv_layout="grouped",
    attention_output="attention.dense",
    gate="",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)


def read_spec(config: HfConfig) -> DecoderSpec:
    bias = config.boolean("attention_bias", True)
    heads = config.integer("num_attention_heads")
    attention = attention_spec(config, num_kv_heads=heads, bias=bias)
    return decoder_spec(
        config,
        "gpt_neox",
        attention,
        max_positions=2048,
        partial_rotary=0.25,
        activation="gelu",
        norm=norm_spec(config, eps=1e-5, kind="layer", bias=True),
        mlp_bias=True,
        parallel=config.boolean("use_parallel_residual", True),
        names=NAMES,
    )


FAMILY = Family(
    name="gpt_neox",
    read_spec=read_spec,
    keys={
        "rms_norm_eps": "layer_norm_eps",
        "partial_rotary_factor": "rotary_pct",
        "rope_theta": "rotary_emb_base",
    },
)
