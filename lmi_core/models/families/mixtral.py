"""Mixtral: Mistral with a mixture of experts for an MLP."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, expert_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import ExpertNames
from lmi_core.weights.hf_config import HfConfig

EACH = "block_sparse_moe.experts.{expert}."
NAMES = ExpertNames(
    router="block_sparse_moe.gate", gate=f"{EACH}w1", up=f"{EACH}w3", down=f"{EACH}w2"
)
KEYS = {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}


def read_spec(config: HfConfig) -> DecoderSpec:
    window = config.optional_integer("sliding_window") or 0
    attention = attention_spec(
        config,
        num_kv_heads=config.integer("num_key_value_heads", 8),
        windows=(window,) * config.num_layers,
    )
    return decoder_spec(
        config,
        "mixtral",
        attention,
        max_positions=131072,
        theta=1000000.0,
        norm=norm_spec(config, eps=1e-5),
        experts=expert_spec(config, num_experts=8, top_k=2, normalizes=True, names=NAMES),
    )


FAMILY = Family(name="mixtral", read_spec=read_spec, keys=KEYS)
