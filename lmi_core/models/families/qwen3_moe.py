"""Qwen3-MoE: Qwen3 with mixtures of experts in some or all layers."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.families import qwen3
from lmi_core.models.families.qwen2_moe import sparse_layers
from lmi_core.models.family import Family, expert_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    experts = expert_spec(
        config,
        num_experts=128,
        top_k=8,
        intermediate_size=768,
        sparse=sparse_layers(config),
        normalizes=config.boolean("norm_topk_prob"),
    )
    config = replace(config, values={"num_key_value_heads": 4, **config.values})
    return replace(qwen3.read_spec(config), family="qwen3_moe", experts=experts)


FAMILY = Family(name="qwen3_moe", read_spec=read_spec, keys={"num_experts": "num_local_experts"})
