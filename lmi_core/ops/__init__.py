"""One function per op, called by model code on handles while a step graph is recorded.

Each appends a node to the graph of its handles, which devices lower to what they run.
"""

from lmi_core.ops.experts import grouped_linear, route
from lmi_core.ops.graph import (
    Graph,
    Handle,
    activation,
    add_positions,
    add_token_types,
    attention,
    clip,
    embed,
    gated_activation,
    gather_logit_rows,
    head_linear,
    linear,
    lora_add,
    norm,
    norm_heads,
    output,
    rms_norm,
    rope_cache_write,
    sample,
    soft_cap,
)
from lmi_core.ops.kept_rows import keep_rows, kept_rows, spread_columns
from lmi_core.ops.operands import KvCache, LinearWeight, LoraTable
from lmi_core.ops.ranks import gathered_linear, meet, norm_all_heads

__all__ = [
    "Graph",
    "Handle",
    "KvCache",
    "LinearWeight",
    "LoraTable",
    "activation",
    "add_positions",
    "add_token_types",
    "attention",
    "clip",
    "embed",
    "gated_activation",
    "gather_logit_rows",
    "gathered_linear",
    "grouped_linear",
    "head_linear",
    "keep_rows",
    "kept_rows",
    "linear",
    "lora_add",
    "meet",
    "norm",
    "norm_all_heads",
    "norm_heads",
    "output",
    "rms_norm",
    "rope_cache_write",
    "route",
    "sample",
    "soft_cap",
    "spread_columns",
]
