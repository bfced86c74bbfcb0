"""One function per op, called by model code on handles while a step graph is recorded.

A recorder stands behind every handle: ``ops.native`` records into the engine's step graph.
"""

from lmi_core.ops.attention import attention, rope_cache_write
from lmi_core.ops.embedding import add_positions, embed, gather_logit_rows
from lmi_core.ops.linear import activation, linear, lora_add, soft_cap
from lmi_core.ops.norm import norm, norm_heads, rms_norm
from lmi_core.ops.recorder import Handle, KvCache, LinearWeight, LoraTable, Recorder
from lmi_core.ops.sampling import sample

__all__ = [
    "Handle",
    "KvCache",
    "LinearWeight",
    "LoraTable",
    "Recorder",
    "activation",
    "add_positions",
    "attention",
    "embed",
    "gather_logit_rows",
    "linear",
    "lora_add",
    "norm",
    "norm_heads",
    "rms_norm",
    "rope_cache_write",
    "sample",
    "soft_cap",
]
