"""Falcon: 7B and 40B rotate, those of RefinedWeb have ALiBi. Before Transformers had them, all were
``RWForCausalLM``, with other keys."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.family import Family, alibi_slopes, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    embedding="transformer.word_embeddings.weight",
    final_norm="transformer.ln_f.weight",
    layer="transformer.h.{layer}.",
    qkv="self_attention.query_key_value",
    qkv_layout="grouped",
    attention_output="self_attention.dense",
    gate="",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
KEYS = {"intermediate_size": "ffn_hidden_size", "hidden_act": "activation"}
KEYS |= {"rms_norm_eps": "layer_norm_epsilon"}
_OLD_KEYS = {"num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
_OLD_KEYS |= {"num_kv_heads": "n_head_kv"}


def read_spec(config: HfConfig) -> DecoderSpec:
    is_old = config.architecture == "RWForCausalLM"
    config = replace(config, keys=KEYS | _OLD_KEYS) if is_old else config
    heads, bias = config.integer("num_attention_heads"), config.boolean("bias")
    is_new = config.boolean("new_decoder_architecture", is_old and "n_head_kv" in config.values)
    parallel = config.boolean("parallel_attn", True)
    names, num_kv_heads = NAMES, 1 if config.boolean("multi_query", True) else heads
    num_kv_heads = config.integer("num_kv_heads", heads) if is_new else num_kv_heads
    if is_new and config.integer("num_ln_in_parallel_attn", 2) == 2:
        names = replace(names, attention_norm="ln_attn.weight", mlp_norm="ln_mlp.weight")
    elif parallel:
        names = replace(names, mlp_norm="")
    attention = attention_spec(config, num_kv_heads=num_kv_heads, bias=bias)
    if config.boolean("alibi"):
        slopes = tuple(slope * attention.scale for slope in alibi_slopes(heads))
        attention = replace(attention, slopes=slopes)
    return decoder_spec(
        config,
        "falcon",
        attention,
        intermediate_size=config.integer("intermediate_size", 4 * config.integer("hidden_size")),
        max_positions=2048,
        activation="gelu",
        tied=True,
        norm=norm_spec(config, eps=1e-5, kind="layer", bias=True),
        mlp_bias=bias,
        parallel=is_new or parallel,
        names=names,
    )


FAMILY = Family(name="falcon", read_spec=read_spec, keys=KEYS)
