"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with mixtures of experts beside a shared one with a gate."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.families import qwen2
from lmi_core.models.family import Family, expert_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import ExpertNames
from lmi_core.weights.hf_config import HfConfig

NAMES = ExpertNames(
    shared_gate="mlp.shared_expert.gate_proj",
    shared_up="mlp.shared_expert.up_proj",
    shared_down="mlp.shared_expert.down_proj",
    shared_router="mlp.shared_expert_gate",
)


def sparse_layers(config: HfConfig) -> tuple[bool, ...]:
    """Every ``decoder_sparse_step``-th one, but for ``mlp_only_layers``."""
    step, dense = config.integer("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise config.error("mlp_only_layers", f"is {dense!r}, but must list layers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(config.num_layers))


def read_spec(config: HfConfig) -> DecoderSpec:
    experts = expert_spec(
        config,
        num_experts=60,
        top_k=4,
        intermediate_size=1408,
        sparse=sparse_layers(config),
        normalizes=config.boolean("norm_topk_prob"),
        shared_size=config.integer("shared_expert_intermediate_size", 5632),
        gates_shared=True,
        names=NAMES,
    )
    return replace(qwen2.read_spec(config), family="qwen2_moe", experts=experts)


FAMILY = Family(name="qwen2_moe", read_spec=read_spec, keys={"num_experts": "num_local_experts"})
