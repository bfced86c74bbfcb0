"""MPT: ALiBi, LayerNorms without biases."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.family import Family, alibi_slopes, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

KEYS = {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
KEYS |= {"max_position_embeddings": "max_seq_len", "rms_norm_eps": "layer_norm_epsilon"}
_MOST = 8.0
NAMES = WeightNames(
    embedding="transformer.wte.weight",
    final_norm="transformer.norm_f.weight",
    layer="transformer.blocks.{layer}.",
    attention_norm="norm_1.weight",
    qkv="attn.Wqkv",
    attention_output="attn.out_proj",
    mlp_norm="norm_2.weight",
    gate="",
    up="ffn.up_proj",
    down="ffn.down_proj",
)


def read_spec(config: HfConfig) -> DecoderSpec:
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    settings = replace(config, values=config.settings("attn_config"))
    for key, wanted in (("alibi", True), ("qk_ln", False), ("prefix_lm", False)):
        settings.require(key, wanted)
    most = settings.number("alibi_bias_max", _MOST)
    note = (
        f"attn_config.alibi_bias_max is {most:g}, by which positions count as in the model's "
        f"training; Transformers' MPT takes {_MOST:g} whatever it is"
    )
    attention = attention_spec(
        config,
        num_kv_heads=heads,
        scale=settings.optional_number("softmax_scale", 0.0),
        clip=settings.optional_number("clip_qkv", 0.0),
        slopes=alibi_slopes(heads, most),
    )
    return decoder_spec(
        config,
        "mpt",
        attention,
        intermediate_size=config.integer("expansion_ratio", 4) * hidden,
        max_positions=2048,
        activation="gelu",
        tied=True,
        norm=norm_spec(config, eps=1e-5, kind="layer", bias=not config.boolean("no_bias", True)),
        names=NAMES,
        notes=(note,) if most != _MOST else (),
    )


FAMILY = Family(name="mpt", read_spec=read_spec, keys=KEYS)
