"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections and long rope.

Which of long rope's lists of factors a text has follows from the longest context that is served, as
in vLLM and llama.cpp, so that no text changes them under way. Transformers goes by the text: one
that grows past the original length is computed anew there with the other list. Both agree where
``max_model_len`` is the original length, and on texts that are longer.
"""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


def read_spec(config: HfConfig) -> DecoderSpec:
    window = config.optional_integer("sliding_window") or 0
    attention = attention_spec(config, windows=(window,) * config.num_layers)
    norm = norm_spec(config, eps=1e-5)
    return decoder_spec(config, "phi3", attention, max_positions=4096, norm=norm, names=NAMES)


FAMILY = Family(name="phi3", read_spec=read_spec)
