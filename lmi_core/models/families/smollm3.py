"""SmolLM3: Llama, every fourth layer of which has no positions."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.family import NO_ROPE, Family, attention_spec, decoder_spec, layer_windows
from lmi_core.models.rope import rope_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    period = config.integer("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [
        (layer + 1) % period for layer in range(config.num_layers)
    ]
    if not isinstance(rotated, list) or len(rotated) != config.num_layers:
        raise config.error("no_rope_layers", f"must list {config.num_layers} of 0 and 1")
    if config.get("layer_types") is None:
        types = ["full_attention" if is_rotated else "sliding_attention" for is_rotated in rotated]
        config = replace(config, values={**config.values, "layer_types": types})
    attention = attention_spec(
        config,
        num_kv_heads=config.integer("num_key_value_heads", 4),
        windows=layer_windows(config),
        bias="attention_bias",
    )
    positions = config.integer("max_position_embeddings", 32768)
    rope = rope_spec(config, attention.head_dim, positions, theta_default=2000000.0)
    return decoder_spec(
        config,
        "smollm3",
        attention,
        max_positions=positions,
        ropes=tuple(rope if is_rotated else NO_ROPE for is_rotated in rotated),
        mlp_bias=config.boolean("mlp_bias"),
        tied=True,
    )


FAMILY = Family(name="smollm3", read_spec=read_spec)
