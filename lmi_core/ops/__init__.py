"""One function per op, called by model code on handles while a step graph is recorded.

Each appends a node to the graph of its handles, which devices lower to what they run.
"""

from lmi_core.ops import graph
from lmi_core.ops.experts import grouped_linear, route
from lmi_core.ops.graph import *  # noqa: F403
from lmi_core.ops.kept_rows import keep_rows, kept_rows, spread_columns
from lmi_core.ops.operands import KvCache, LinearWeight, LoraTable
from lmi_core.ops.ranks import gathered_linear, meet, norm_all_heads

__all__ = [
    *graph.__all__,
    "KvCache",
    "LinearWeight",
    "LoraTable",
    "gathered_linear",
    "grouped_linear",
    "keep_rows",
    "kept_rows",
    "meet",
    "norm_all_heads",
    "route",
    "spread_columns",
]
