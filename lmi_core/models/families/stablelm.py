"""StableLM: LayerNorms with biases, a quarter of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    q_norm="self_attn.q_layernorm.norms.{head}.weight",
    k_norm="self_attn.k_layernorm.norms.{head}.weight",
)


def read_spec(config: HfConfig) -> DecoderSpec:
    parallel = config.boolean("use_parallel_residual")
    attention = attention_spec(
        config,
        qkv_bias=config.boolean("use_qkv_bias"),
        qk_norm="layers" if config.boolean("qk_layernorm") else "",
    )
    return decoder_spec(
        config,
        "stablelm",
        attention,
        max_positions=4096,
        partial_rotary=0.25,
        norm=norm_spec(config, eps=1e-5, kind="layer", bias=True),
        parallel=parallel,
        names=replace(NAMES, mlp_norm="") if parallel else NAMES,
    )


FAMILY = Family(
    name="stablelm",
    read_spec=read_spec,
    keys={"rms_norm_eps": "layer_norm_eps"},
)
