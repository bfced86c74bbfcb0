"""InternLM 1: Llama with biases of attention."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.family import Family, attention_spec, decoder_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig

_KINDS = {"origin": "default", "dynamic": "dynamic"}


def read_spec(config: HfConfig) -> DecoderSpec:
    bias = config.boolean("bias", True)
    attention = attention_spec(config, bias=bias)
    return decoder_spec(_with_rope(config), "internlm", attention, max_positions=2048)


def _with_rope(config: HfConfig) -> HfConfig:
    """With what the key ``rotary`` says, as others say it."""
    rotary = config.get("rotary") or {}
    kind = rotary.get("type", "origin") if isinstance(rotary, dict) else None
    if not isinstance(kind, str) or kind not in _KINDS:
        raise config.error("rotary", f"is {rotary!r}; its type must be one of {', '.join(_KINDS)}")
    values = {"rope_theta": rotary.get("base", 10000), **config.values}
    if not config.get("rope_scaling") and not config.get("rope_parameters"):
        factor = rotary.get("scaling_factor", 1.0)
        values["rope_parameters"] = {"rope_type": _KINDS[kind], "factor": factor}
    return replace(config, values=values)


FAMILY = Family(name="internlm", read_spec=read_spec)
