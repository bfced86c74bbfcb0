"""GPT-2: learned positions, matrices that are stored transposed."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

KEYS = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
KEYS |= {"intermediate_size": "n_inner", "max_position_embeddings": "n_positions"}
KEYS |= {"hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"}
NAMES = WeightNames(
    embedding="transformer.wte.weight",
    positions="transformer.wpe.weight",
    final_norm="transformer.ln_f.weight",
    layer="transformer.h.{layer}.",
    attention_norm="ln_1.weight",
    qkv="attn.c_attn",
    attention_output="attn.c_proj",
    mlp_norm="ln_2.weight",
    gate="",
    up="mlp.c_fc",
    down="mlp.c_proj",
    transposed=True,
    ignored=("attn.bias", "attn.masked_bias"),
)


def score_scale(config: HfConfig) -> float:
    """What scores are multiplied with: nothing where ``scale_attn_weights`` is false."""
    scales = config.boolean("scale_attn_weights", True)
    return config.head_dim() ** -0.5 if scales else 1.0


def read_spec(config: HfConfig) -> DecoderSpec:
    config.require("scale_attn_by_inverse_layer_idx", False)
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    attention = attention_spec(config, num_kv_heads=heads, scale=score_scale(config), bias=True)
    return decoder_spec(
        config,
        "gpt2",
        attention,
        intermediate_size=config.integer("intermediate_size", 4 * hidden),
        max_positions=1024,
        activation="gelu_new",
        tied=True,
        norm=norm_spec(config, eps=1e-5, kind="layer", bias=True),
        mlp_bias=True,
        num_positions=config.integer("max_position_embeddings", 1024),
        names=NAMES,
    )


FAMILY = Family(name="gpt2", read_spec=read_spec, keys=KEYS)
