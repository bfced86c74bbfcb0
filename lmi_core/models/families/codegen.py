"""CodeGen: GPT-J with fused heads in four shards."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from lmi_core.models.families.gpt2 import KEYS
from lmi_core.models.families.gptj import NAMES, read_spec
from lmi_core.models.family import Family

FAMILY = Family(
    name="codegen",
    read_spec=partial(read_spec, names=replace(NAMES, qkv="attn.qkv_proj", qkv_layout="codegen")),
    keys=KEYS,
)
