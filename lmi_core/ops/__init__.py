"""One function per op, called by model code on handles while a step graph is recorded.

Each appends a node to the graph of its handles, which devices lower to what they run. Ops on the KV
cache are in attention.py.
"""

from lmi_core.ops.embedding import add_positions, add_token_types, embed, gather_logit_rows
from lmi_core.ops.experts import grouped_linear, route
from lmi_core.ops.graph import Graph, Handle, KvCache, LinearWeight, LoraTable
from lmi_core.ops.kept_rows import keep_rows, kept_rows, spread_columns
from lmi_core.ops.linear import (
    activation,
    clip,
    gated_activation,
    gathered_linear,
    head_linear,
    linear,
    lora_add,
    meet,
    soft_cap,
)
from lmi_core.ops.norm import norm, norm_all_heads, norm_heads, rms_norm
from lmi_core.ops.sampling import output, sample

__all__ = [
    "Graph",
    "Handle",
    "KvCache",
    "LinearWeight",
    "LoraTable",
    "activation",
    "add_positions",
    "add_token_types",
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
    "route",
    "sample",
    "soft_cap",
    "spread_columns",
    "clip",
]
