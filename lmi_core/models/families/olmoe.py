"""OLMoE: mixtures of experts, norms of all query and key heads together."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, expert_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    normalizes = config.boolean("norm_topk_prob")
    attention = attention_spec(
        config,
        clip=config.optional_number("clip_qkv", 0.0),
        bias="attention_bias",
        qk_norm="row",
    )
    return decoder_spec(
        config,
        "olmoe",
        attention,
        max_positions=4096,
        norm=norm_spec(config, eps=1e-5),
        experts=expert_spec(config, num_experts=64, top_k=8, normalizes=normalizes),
    )


FAMILY = Family(
    name="olmoe", read_spec=read_spec, keys={"moe_intermediate_size": "intermediate_size"}
)
