"""InternLM 3: Llama with biases by other names."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    bias, qkv_bias = (config.boolean(f"{part}_bias") for part in ("mlp", "attention"))
    attention = attention_spec(config, qkv_bias=qkv_bias, output_bias=bias)
    norm = norm_spec(config, eps=1e-5)
    return decoder_spec(
        config, "internlm3", attention, max_positions=32768, norm=norm, mlp_bias=bias
    )


FAMILY = Family(
    name="internlm3",
    read_spec=read_spec,
    keys={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
)
