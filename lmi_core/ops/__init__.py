"""One function per op, called by model code on handles while a step graph is recorded.

A recorder stands behind every handle: ``ops.native`` records into the engine's step graph.
"""

from lmi_core.ops.attention import attention, rope_cache_write
from lmi_core.ops.embedding import embed, gather_logit_rows
from lmi_core.ops.linear import gated_activation, linear, lora_add
from lmi_core.ops.norm import rms_norm
from lmi_core.ops.recorder import Handle, KvCache, LinearWeight, LoraTable, Recorder
from lmi_core.ops.sampling import sample

__all__ = [
    "Handle",
    "KvCache",
    "LinearWeight",
    "LoraTable",
    "Recorder",
    "attention",
    "embed",
    "gated_activation",
    "gather_logit_rows",
    "linear",
    "lora_add",
    "rms_norm",
    "rope_cache_write",
    "sample",
]
