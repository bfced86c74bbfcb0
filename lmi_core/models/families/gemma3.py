"""Gemma 3: query and key norms; five local layers for one that sees everything."""

from __future__ import annotations

from lmi_core.models.families.gemma import KEYS, gemma_decoder
from lmi_core.models.families.gemma2 import NAMES, windowed_attention
from lmi_core.models.family import Family, local_layers, ropes_by_type
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    local = local_layers(config, config.integer("sliding_window_pattern", 6))
    attention = windowed_attention(config, local, qk_norm="head")
    cap = config.optional_number("attn_logit_softcapping", 0.0)
    note = (
        f"attn_logit_softcapping is {cap:g}, but scores aren't capped, as in Transformers' Gemma 3"
    )
    return gemma_decoder(
        config,
        "gemma3",
        attention,
        max_positions=131072,
        ropes=ropes_by_type(config, attention, local, 131072, thetas=(10000.0, 1000000.0)),
        logit_soft_cap=config.optional_number("final_logit_softcapping", 0.0),
        names=NAMES,
        notes=(note,) if cap else (),
    )


FAMILY = Family(name="gemma3", read_spec=read_spec, keys=KEYS)
