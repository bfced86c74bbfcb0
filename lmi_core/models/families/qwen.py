"""Qwen 1: fused projections with biases; contexts end where scores or frequencies would change."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.family import Family, attention_spec, decoder_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    embedding="transformer.wte.weight",
    final_norm="transformer.ln_f.weight",
    layer="transformer.h.{layer}.",
    attention_norm="ln_1.weight",
    qkv="attn.c_attn",
    attention_output="attn.c_proj",
    mlp_norm="ln_2.weight",
    gate="mlp.w2",
    up="mlp.w1",
    down="mlp.c_proj",
    ignored=("rotary_emb.inv_freq", "attn.masked_bias"),
)
_STRETCHES = ("use_dynamic_ntk", "use_logn_attn")


def read_spec(config: HfConfig) -> DecoderSpec:
    """``intermediate_size`` is of gate and up together."""
    config.require("visual", None)
    config.require("scale_attn_weights", True)
    heads, bias = config.integer("num_attention_heads"), not config.boolean("no_bias", True)
    attention = attention_spec(config, num_kv_heads=heads, qkv_bias=True, output_bias=bias)
    inner = config.integer("intermediate_size", minimum=2) // 2
    spec = decoder_spec(
        config,
        "qwen",
        attention,
        max_positions=8192,
        intermediate_size=inner,
        mlp_bias=bias,
        names=NAMES,
    )
    trained, used = config.integer("seq_length", spec.max_positions), _used(config)
    if used and trained < spec.max_positions:
        note = f"{' and '.join(used)}: not supported beyond seq_length, contexts end at {trained}"
        spec = replace(spec, max_positions=trained, notes=(f"{note} tokens",))
    return spec


def _used(config: HfConfig) -> list[str]:
    return [key for key in _STRETCHES if config.boolean(key)]


KEYS = {"head_dim": "kv_channels", "rms_norm_eps": "layer_norm_epsilon"}
KEYS |= {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"}
FAMILY = Family(name="qwen", read_spec=read_spec, keys=KEYS)
