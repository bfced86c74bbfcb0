"""OLMo 3: OLMo 2 with windows; only layers that see everything stretch positions."""

from __future__ import annotations

from lmi_core.models.families.olmo2 import NAMES
from lmi_core.models.family import (
    Family,
    attention_spec,
    decoder_spec,
    local_layers,
    local_windows,
    norm_spec,
    ropes_by_type,
)
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    local = local_layers(config, 4)
    attention = attention_spec(
        config,
        windows=local_windows(config, local, 4096),
        bias="attention_bias",
        qk_norm="row",
    )
    return decoder_spec(
        config,
        "olmo3",
        attention,
        max_positions=2048,
        ropes=ropes_by_type(config, attention, local, 2048, thetas=(500000.0, 500000.0)),
        norm=norm_spec(config, eps=1e-5),
        names=NAMES,
    )


FAMILY = Family(name="olmo3", read_spec=read_spec)
