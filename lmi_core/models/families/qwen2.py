"""Qwen2 and Qwen2.5: biases on q, k and v; windows from a certain layer on."""

from __future__ import annotations

from lmi_core.models.family import (
    Family,
    attention_spec,
    decoder_spec,
    layer_windows,
)
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    attention = attention_spec(
        config,
        windows=layer_windows(config),
        qkv_bias=True,
    )
    return decoder_spec(config, "qwen2", attention, max_positions=32768)


FAMILY = Family(name="qwen2", read_spec=read_spec)
