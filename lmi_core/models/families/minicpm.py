"""MiniCPM: Llama with multipliers of embeddings, residuals and logits."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec
from lmi_core.models.spec import DecoderSpec, NormSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    """The stream is held as a part of itself, as Granite's."""
    for key in ("num_experts", "sparse_config"):
        config.require(key, None)
    hidden = config.integer("hidden_size")
    residual = config.number("scale_depth", 1.0) / config.num_layers**0.5
    return decoder_spec(
        config,
        "minicpm",
        attention_spec(config, bias="attention_bias"),
        max_positions=2048,
        tied=True,
        norm=NormSpec(eps=config.number("rms_norm_eps", 1e-6) / residual**2),
        embedding_scale=config.number("scale_emb", 1.0) / residual,
        logit_scale=config.integer("dim_model_base", hidden) / hidden,
    )


FAMILY = Family(name="minicpm", read_spec=read_spec)
