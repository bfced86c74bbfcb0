"""ChatGLM 2 and 3, and GLM-4 in the files of its first release: neighbouring dimensions rotated,
half of them; fused projections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.rope import rope_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    embedding="transformer.embedding.word_embeddings.weight",
    final_norm="transformer.encoder.final_layernorm.weight",
    head="transformer.output_layer",
    layer="transformer.encoder.layers.{layer}.",
    qkv="self_attention.query_key_value",
    attention_output="self_attention.dense",
    gate_up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    ignored=("rotary_pos_emb.inv_freq",),
)
_ONLY = {"position_encoding_2d": False, "pre_seq_len": None, "quantization_bit": 0}
_ONLY |= {"rmsnorm": True, "post_layer_norm": True, "multi_query_attention": True}
_ONLY |= {"apply_residual_connection_post_layernorm": False}


def read_spec(config: HfConfig) -> DecoderSpec:
    """``rope_ratio`` is of theta; in ChatGLM 2, positions are divided by it."""
    for key, wanted in _ONLY.items():
        config.require(key, wanted)
    bias = config.boolean("add_bias_linear")
    attention = attention_spec(
        config,
        num_kv_heads=config.integer("multi_query_group_num"),
        head_dim=config.head_dim(),
        qkv_bias=bias or config.boolean("add_qkv_bias"),
        output_bias=bias,
        interleaved=True,
    )
    ratio, positions = config.number("rope_ratio", 1.0), config.integer("max_position_embeddings")
    size, theta = attention.head_dim, 10000.0 * ratio
    rope = rope_spec(config, size, positions, partial_default=0.5, theta_default=theta)
    divides = ratio > 1.0 and "chatglm2" in config.string("_name_or_path", "").lower()
    if divides:
        rope = replace(rope, kind="linear", factor=ratio, theta=10000.0)
    ropes, norm = (rope,) * config.num_layers, norm_spec(config, eps=1e-5)
    changes: dict[str, Any] = {"ropes": ropes, "norm": norm, "mlp_bias": bias, "names": NAMES}
    spec = decoder_spec(config, "chatglm", attention, max_positions=1, **changes)
    return replace(spec, max_positions=positions) if divides else spec


KEYS = {"num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size"}
KEYS |= {"max_position_embeddings": "seq_length", "rms_norm_eps": "layernorm_epsilon"}
KEYS |= {"vocab_size": "padded_vocab_size", "head_dim": "kv_channels"}
FAMILY = Family(name="chatglm", read_spec=read_spec, keys=KEYS)
