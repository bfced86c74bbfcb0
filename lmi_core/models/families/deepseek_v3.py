"""DeepSeek-V3 and R1: V2's latent attention, experts chosen by sigmoids with a bias."""

from __future__ import annotations

from lmi_core.models.families.deepseek_v2 import KEYS, deepseek
from lmi_core.models.families.glm4_moe import sigmoid_experts
from lmi_core.models.family import Family
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    config.require("rope_interleave", True)
    experts = sigmoid_experts(
        config,
        groups=(8, 4),
        scale=2.5,
        num_experts=256,
        top_k=8,
        intermediate_size=2048,
        num_dense=config.integer("first_k_dense_replace", 3, minimum=0),
    )
    further = config.integer("num_nextn_predict_layers", 1, minimum=0)
    names = WeightNames(ignored_layers=further)
    return deepseek(config, "deepseek_v3", experts, max_positions=4096, names=names)


FAMILY = Family(name="deepseek_v3", read_spec=read_spec, keys=KEYS)
