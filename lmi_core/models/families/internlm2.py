"""InternLM 2 and 2.5: Llama with its projections fused by key and value head, and other names."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    embedding="model.tok_embeddings.weight",
    head="output",
    attention_norm="attention_norm.weight",
    qkv="attention.wqkv",
    qkv_layout="grouped",
    attention_output="attention.wo",
    mlp_norm="ffn_norm.weight",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
)


def read_spec(config: HfConfig) -> DecoderSpec:
    bias = config.boolean("bias", True)
    attention = attention_spec(config, bias=bias)
    return decoder_spec(config, "internlm2", attention, max_positions=2048, names=NAMES)


FAMILY = Family(name="internlm2", read_spec=read_spec)
