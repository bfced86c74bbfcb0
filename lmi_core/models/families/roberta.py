"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT with positions from the row behind padding's on."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.families import bert
from lmi_core.models.family import Family
from lmi_core.models.pooling_head import HeadLayer
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.hf_config import HfConfig


def renamed(names: WeightNames, prefix: str) -> WeightNames:
    """BERT's names under another prefix."""
    tables = ("embedding", "positions", "token_types", "embedding_norm", "layer")
    changed = {name: getattr(names, name).replace("bert.", prefix, 1) for name in tables}
    return replace(names, **changed, head="lm_head")


def read_spec(config: HfConfig) -> DecoderSpec:
    offset = config.integer("pad_token_id", 1, minimum=0) + 1
    spec = bert.read_spec(config, renamed(bert.NAMES, "roberta."), offset)
    return replace(spec, family="roberta", max_positions=spec.max_positions - offset)


def classifier(spec: DecoderSpec, config: HfConfig) -> tuple[HeadLayer, ...]:
    size = spec.hidden_size
    dense = HeadLayer("classifier.dense", size, size, activation="tanh")
    return dense, HeadLayer("classifier.out_proj", 1, size)


FAMILY = Family(name="roberta", read_spec=read_spec, keys=bert.KEYS, classifier=classifier)
