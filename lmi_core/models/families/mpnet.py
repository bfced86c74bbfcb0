"""MPNet: BERT with a bias by distance that its layers share, and without token types."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.families import bert, roberta
from lmi_core.models.family import Family
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig

OFFSET = 2
NAMES = replace(
    roberta.renamed(bert.NAMES, "mpnet."),
    token_types="",
    relative_bias="mpnet.encoder.relative_attention_bias.weight",
    attention_norm="attention.LayerNorm.weight",
    q="attention.attn.q",
    k="attention.attn.k",
    v="attention.attn.v",
    attention_output="attention.attn.o",
)


def read_spec(config: HfConfig) -> DecoderSpec:
    spec = bert.read_spec(config, NAMES, OFFSET)
    buckets = config.integer("relative_attention_num_buckets", 32)
    return replace(
        spec,
        family="mpnet",
        attention=replace(spec.attention, relative_buckets=buckets),
        max_positions=spec.max_positions - OFFSET,
    )


FAMILY = Family(name="mpnet", read_spec=read_spec, keys=bert.KEYS, classifier=roberta.classifier)
