"""Granite-MoE: Granite with mixtures of experts, each layer's in two tensors."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.families import granite
from lmi_core.models.families.mixtral import KEYS
from lmi_core.models.family import Family, expert_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import ExpertNames
from lmi_core.weights.hf_config import HfConfig

NAMES = ExpertNames(
    router="block_sparse_moe.router.layer",
    gate="",
    up="",
    down="",
    merged_gate_up="block_sparse_moe.input_linear.weight",
    merged_down="block_sparse_moe.output_linear.weight",
)


def read_spec(config: HfConfig) -> DecoderSpec:
    experts = expert_spec(config, num_experts=8, top_k=2, normalizes=True, names=NAMES)
    return replace(granite.read_spec(config), family="granite_moe", experts=experts)


FAMILY = Family(name="granite_moe", read_spec=read_spec, keys=KEYS)
