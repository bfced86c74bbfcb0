"""GLM-4.5: experts chosen by sigmoids with a bias, from the best groups, beside a shared one; the
first layers are dense."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, expert_spec, norm_spec
from lmi_core.models.spec import DecoderSpec, ExpertSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

KEYS = {"num_experts": "n_routed_experts"}


def sigmoid_experts(
    config: HfConfig, *, groups: tuple[int, int] = (1, 1), scale: float = 1.0, **defaults: int
) -> ExpertSpec:
    """As DeepSeek-V3 has them; ``groups``, all and the best ones, ``scale`` and ``defaults``, of
    ``expert_spec``, are the family's where config.json has none."""
    num_groups = config.integer("n_group", groups[0])
    inner = config.integer("moe_intermediate_size", defaults["intermediate_size"])
    return expert_spec(
        config,
        **defaults,
        scoring="sigmoid",
        normalizes=config.boolean("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", scale),
        num_groups=num_groups,
        top_groups=config.integer("topk_group", groups[1]),
        group_best=min(2, config.integer("num_experts", defaults["num_experts"]) // num_groups),
        choice_bias=True,
        shared_size=inner * config.integer("n_shared_experts", 1, minimum=0),
    )


def read_spec(config: HfConfig) -> DecoderSpec:
    num_dense = config.integer("first_k_dense_replace", 1, minimum=0)
    attention = attention_spec(
        config,
        qkv_bias=config.boolean("attention_bias"),
        qk_norm="head" if config.boolean("use_qk_norm") else "",
    )
    return decoder_spec(
        config,
        "glm4_moe",
        attention,
        max_positions=131072,
        partial_rotary=0.5,
        norm=norm_spec(config, eps=1e-5),
        experts=sigmoid_experts(
            config, num_experts=128, top_k=8, intermediate_size=1408, num_dense=num_dense
        ),
        names=WeightNames(ignored_layers=config.integer("num_nextn_predict_layers", 0, minimum=0)),
    )


FAMILY = Family(name="glm4_moe", read_spec=read_spec, keys=KEYS)
