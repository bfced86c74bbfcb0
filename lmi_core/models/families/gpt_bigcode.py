"""GPT-BigCode (SantaCoder, StarCoder): GPT-2 with one key and value head."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.families.gpt2 import KEYS, NAMES, score_scale
from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import QkvLayout
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    multi_query = config.boolean("multi_query", True)
    heads = 1 if multi_query else config.integer("num_attention_heads")
    layout: QkvLayout = "blocks" if multi_query else "grouped"
    attention = attention_spec(
        config,
        num_kv_heads=heads,
        scale=score_scale(config),
        bias=True,
    )
    return decoder_spec(
        config,
        "gpt_bigcode",
        attention,
        intermediate_size=config.integer("intermediate_size", 4 * config.integer("hidden_size")),
        max_positions=1024,
        activation="gelu_pytorch_tanh",
        tied=True,
        norm=norm_spec(config, eps=1e-5, kind="layer", bias=True),
        mlp_bias=True,
        num_positions=config.integer("max_position_embeddings", 1024),
        names=replace(NAMES, transposed=False, qkv_layout=layout),
    )


FAMILY = Family(name="gpt_bigcode", read_spec=read_spec, keys=KEYS)
