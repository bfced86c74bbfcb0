"""GLM-4 of 2025: GLM with norms of what layers add."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lmi_core.models.families.glm import NAMES, read_spec
from lmi_core.models.family import Family

FAMILY = Family(
    name="glm4",
    read_spec=partial(
        read_spec,
        names=replace(
            NAMES,
            attention_post_norm="post_self_attn_layernorm.weight",
            mlp_post_norm="post_mlp_layernorm.weight",
        ),
    ),
)
