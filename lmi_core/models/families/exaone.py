"""EXAONE 3 and 3.5: Llama with other names."""

from __future__ import annotations

from lmi_core.models.family import Family, attention_spec, decoder_spec, norm_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(
    embedding="transformer.wte.weight",
    final_norm="transformer.ln_f.weight",
    layer="transformer.h.{layer}.",
    attention_norm="ln_1.weight",
    q="attn.attention.q_proj",
    k="attn.attention.k_proj",
    v="attn.attention.v_proj",
    attention_output="attn.attention.out_proj",
    mlp_norm="ln_2.weight",
    gate="mlp.c_fc_0",
    up="mlp.c_fc_1",
    down="mlp.c_proj",
    ignored=("rotary.inv_freq", "rotary_emb.inv_freq"),
)


def read_spec(config: HfConfig) -> DecoderSpec:
    norm = norm_spec(config, eps=1e-5)
    return decoder_spec(
        config, "exaone", attention_spec(config), max_positions=2048, norm=norm, names=NAMES
    )


KEYS = {"num_hidden_layers": "num_layers", "hidden_act": "activation_function"}
KEYS |= {"rms_norm_eps": "layer_norm_epsilon"}
FAMILY = Family(name="exaone", read_spec=read_spec, keys=KEYS)
