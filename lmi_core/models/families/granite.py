"""Granite: Llama with multipliers of embeddings, residuals, scores and logits."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec
from lmi_core.models.spec import DecoderSpec, NormSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    """With a residual multiplier r, the stream is held as its r-th part: what is added needs no
    multiplier then, and norms give the same with eps / r^2."""
    scale = config.number("attention_multiplier", 1.0)
    attention = attention_spec(config, scale=scale, bias="attention_bias")
    residual = config.number("residual_multiplier", 1.0)
    return decoder_spec(
        config,
        "granite",
        attention,
        max_positions=2048,
        mlp_bias=config.boolean("mlp_bias"),
        norm=NormSpec(eps=config.number("rms_norm_eps", 1e-6) / residual**2),
        embedding_scale=config.number("embedding_multiplier", 1.0) / residual,
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


FAMILY = Family(name="granite", read_spec=read_spec)
