"""Gemma 1: (1 + w) norms, embeddings times the root of their size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import AttentionSpec, DecoderSpec
from lmi_core.weights.hf_config import HfConfig

KEYS = {"hidden_act": "hidden_activation"}


def gemma_attention(config: HfConfig, **changes: Any) -> AttentionSpec:
    """Attention of all Gemmas; ``changes``: what ``attention_spec`` takes."""
    if config.get("use_bidirectional_attention"):
        raise config.error("use_bidirectional_attention", "is true, but text is generated causally")
    head_dim = config.head_dim(256)
    return attention_spec(config, head_dim=head_dim, bias="attention_bias", **changes)


def gemma_decoder(
    config: HfConfig, name: str, attention: AttentionSpec, *, max_positions: int, **changes: Any
) -> DecoderSpec:
    """The rest of all Gemmas; ``changes``: what ``decoder_spec`` takes."""
    return decoder_spec(
        config,
        name,
        attention,
        max_positions=max_positions,
        activation="gelu_pytorch_tanh",
        tied=True,
        norm=norm_spec(config, offset=1.0),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        rounds_embedding_scale=True,
        **changes,
    )


def read_spec(config: HfConfig) -> DecoderSpec:
    values, attention = dict(config.values), gemma_attention(config)
    # Early files say gelu and mean its approximation, which the models were trained with.
    if values.get("hidden_act") == "gelu":
        values["hidden_act"] = "gelu_pytorch_tanh"
    return gemma_decoder(replace(config, values=values), "gemma", attention, max_positions=8192)


FAMILY = Family(name="gemma", read_spec=read_spec, keys=KEYS)
