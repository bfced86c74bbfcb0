"""Cohere's Command R7B and A: windows, outside of which nothing is rotated."""

from __future__ import annotations

from dataclasses import replace

from lmi_core.models.families.cohere import read_spec as read_cohere
from lmi_core.models.family import NO_ROPE, Family, local_layers, local_windows
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.hf_config import HfConfig


def read_spec(config: HfConfig) -> DecoderSpec:
    spec = read_cohere(config)
    local = local_layers(config, config.integer("sliding_window_pattern", 4))
    rope = spec.ropes[0]
    return replace(
        spec,
        family="cohere2",
        attention=replace(spec.attention, windows=local_windows(config, local, 4096)),
        ropes=tuple(rope if is_local else NO_ROPE for is_local in local),
    )


FAMILY = Family(
    name="cohere2",
    read_spec=read_spec,
    keys={"rms_norm_eps": "layer_norm_eps"},
)
