"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections and long rope.

Which of long rope's lists of factors a text has follows from the longest context that is served, as
in vLLM and llama.cpp, so that no text changes them under way. Transformers goes by the text: one
that grows past the original length is computed anew there with the other list. Both agree where
``max_model_len`` is the original length, and on texts that are longer.
"""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.rope import rope_values
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
_ORIGINAL, _LENGTH = "original_max_position_embeddings", 4096


def _with_original_length(config: HfConfig) -> HfConfig:
    """Long rope's, which Transformers reads at the top level alone: where it isn't there, it is the
    first Phi-3's, whatever the rotary settings say."""
    if config.values.get(_ORIGINAL) is not None:
        return config
    key, values = rope_values(config)
    if (stated := values.get(_ORIGINAL)) not in (None, _LENGTH):
        raise config.error(
            f"{key}.{_ORIGINAL}",
            f"is {stated!r:.40}, but Phi-3 has it beside max_position_embeddings, where it is "
            f"{_LENGTH} if absent: write it there",
        )
    return replace(config, values={**config.values, _ORIGINAL: _LENGTH})


def _with_long_rope(config: HfConfig) -> HfConfig:
    """What early files call yarn, as Transformers reads them: by its lists of factors."""
    key, values = rope_values(config)
    if values.get("rope_type", values.get("type")) != "yarn" or "short_factor" not in values:
        return config
    return replace(config, values={**config.values, key: {**values, "rope_type": "longrope"}})


def read_spec(config: HfConfig) -> DecoderSpec:
    config = _with_long_rope(_with_original_length(config))
    window = config.optional_integer("sliding_window") or 0
    attention = attention_spec(config, windows=(window,) * config.num_layers)
    norm = norm_spec(config, eps=1e-5)
    return decoder_spec(config, "phi3", attention, max_positions=4096, norm=norm, names=NAMES)


FAMILY = Family(name="phi3", read_spec=read_spec)
