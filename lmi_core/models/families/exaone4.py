"""EXAONE 4: norms of what layers add; with windows, global layers aren't rotated."""

from __future__ import annotations

from lmi_core.models.families.olmo2 import NAMES
from lmi_core.models.family import (
    NO_ROPE,
    Family,
    attention_spec,
    decoder_spec,
    local_layers,
    local_windows,
    norm_spec,
)
from lmi_core.models.rope import rope_spec
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    pattern = config.get("sliding_window_pattern", 4)
    period = (
        len(pattern) if isinstance(pattern, str) else config.integer("sliding_window_pattern", 4)
    )
    has_window = config.optional_integer("sliding_window", 4096) is not None
    local = (False,) * config.num_layers
    if has_window:
        local = local_layers(config, period)
    attention = attention_spec(config, windows=local_windows(config, local, 4096), qk_norm="head")
    positions = config.integer("max_position_embeddings", 2048)
    rope = rope_spec(config, attention.head_dim, positions)
    return decoder_spec(
        config,
        "exaone4",
        attention,
        max_positions=positions,
        ropes=tuple(NO_ROPE if has_window and not is_local else rope for is_local in local),
        norm=norm_spec(config, eps=1e-5),
        names=NAMES,
    )


FAMILY = Family(name="exaone4", read_spec=read_spec)
