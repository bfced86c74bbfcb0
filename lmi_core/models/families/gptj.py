"""GPT-J: neighbouring dimensions rotated, attention and MLP side by side."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.families.gpt2 import KEYS
from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.rope import rope_spec
from lmi_core.models.spec import CODEGEN_SHARDS, DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    embedding="transformer.wte.weight",
    final_norm="transformer.ln_f.weight",
    layer="transformer.h.{layer}.",
    attention_norm="ln_1.weight",
    q="attn.q_proj",
    k="attn.k_proj",
    v="attn.v_proj",
    attention_output="attn.out_proj",
    mlp_norm="",
    gate="",
    up="mlp.fc_in",
    down="mlp.fc_out",
    ignored=("attn.bias", "attn.masked_bias", "attn.causal_mask", "attn.embed_positions"),
)


def read_spec(config: HfConfig, names: WeightNames = NAMES) -> DecoderSpec:
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    attention = attention_spec(config, num_kv_heads=heads, interleaved=True)
    positions = config.integer("max_position_embeddings", 2048)
    rotary_dim = config.optional_integer("rotary_dim", 64) or attention.head_dim
    if rotary_dim > attention.head_dim or rotary_dim % 2:
        size = f"must be an even number up to the head's size of {attention.head_dim}"
        raise config.error("rotary_dim", f"is {rotary_dim}, but {size}")
    if names.qkv_layout == "codegen" and heads % CODEGEN_SHARDS:
        problem = f"is {heads}, but must be a multiple of {CODEGEN_SHARDS}: {names.qkv} lies so"
        raise config.error("num_attention_heads", problem)
    rope = replace(rope_spec(config, attention.head_dim, positions), rotary_dim=rotary_dim)
    return decoder_spec(
        config,
        "gptj",
        attention,
        intermediate_size=config.integer("intermediate_size", 4 * hidden),
        max_positions=positions,
        ropes=(rope,) * config.num_layers,
        activation="gelu_new",
        norm=norm_spec(config, eps=1e-5, kind="layer", bias=True),
        mlp_bias=True,
        head_bias=True,
        parallel=True,
        names=names,
    )


FAMILY = Family(name="gptj", read_spec=read_spec, keys=KEYS)
