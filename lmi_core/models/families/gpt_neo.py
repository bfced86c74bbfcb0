"""GPT-Neo: GPT-2 with unscaled scores and windows in every other layer."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.families.gpt2 import NAMES
from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig

KEYS = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
KEYS |= {"hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"}


def read_spec(config: HfConfig) -> DecoderSpec:
    window, layers = config.integer("window_size", 256), config.num_layers
    try:
        types = config.get("attention_layers") or [
            kind
            for kinds, count in config.get("attention_types", [[["global", "local"], layers // 2]])
            for kind in kinds * min(count, layers)
        ]
        windows = tuple(window if kind == "local" else 0 for kind in types)
    except (TypeError, ValueError):
        windows = ()
    if len(windows) != layers:
        raise config.error("attention_types", "must be of all layers")
    attention = attention_spec(
        config,
        num_kv_heads=config.integer("num_attention_heads"),
        windows=windows,
        scale=1.0,
        output_bias=True,
    )
    return decoder_spec(
        config,
        "gpt_neo",
        attention,
        intermediate_size=config.integer("intermediate_size", 4 * config.integer("hidden_size")),
        max_positions=2048,
        activation="gelu_new",
        tied=True,
        norm=norm_spec(config, eps=1e-5, kind="layer", bias=True),
        mlp_bias=True,
        num_positions=config.integer("max_position_embeddings", 2048),
        names=replace(
            NAMES,
            transposed=False,
            qkv="",
            q="attn.attention.q_proj",
            k="attn.attention.k_proj",
            v="attn.attention.v_proj",
            attention_output="attn.attention.out_proj",
            ignored=("attention.bias", "attention.masked_bias"),
        ),
    )


FAMILY = Family(name="gpt_neo", read_spec=read_spec, keys=KEYS)
