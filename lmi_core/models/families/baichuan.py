"""Baichuan 1 and 2: 7B rotate, 13B have ALiBi; the rows of 2's head are of length 1."""

from __future__ import annotations

from lmi_core.models.family import Family, alibi_slopes, attention_spec, decoder_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig

NAMES = WeightNames(qkv="self_attn.W_pack")
_VOCAB_SIZE_2 = 125696


def read_spec(config: HfConfig) -> DecoderSpec:
    """Files of models that rotate say ``max_position_embeddings``, others only
    ``model_max_length``; ``z_loss_weight`` is in those of Baichuan 2."""
    heads = config.integer("num_attention_heads")
    rotates = config.values.get("max_position_embeddings") is not None
    attention = attention_spec(
        config, num_kv_heads=heads, slopes=() if rotates else alibi_slopes(heads)
    )
    is_second = config.integer("vocab_size") == _VOCAB_SIZE_2 or "z_loss_weight" in config.values
    return decoder_spec(
        config, "baichuan", attention, max_positions=4096, normed_head=is_second, names=NAMES
    )


FAMILY = Family(
    name="baichuan", read_spec=read_spec, keys={"max_position_embeddings": "model_max_length"}
)
