"""A model's load in a header of its answers, for balancers that ask for it.

The forms are ORCA's (the header ``endpoint-load-metrics`` of xDS' load reports) with the metrics
that vLLM names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from lmi_server.models.backend import Reports

_ASKED = "endpoint-load-metrics-format"
_HEADER = "endpoint-load-metrics"


def load_report(headers: Mapping[str, str], backend: Reports) -> dict[str, str]:
    """The header that a request's headers ask for; empty for none and for unknown forms."""
    form = headers.get(_ASKED, "").upper()
    if form not in ("TEXT", "JSON"):
        return {}
    stats = backend.stats()
    metrics = {
        "kv_cache_usage_perc": stats.num_used_blocks / max(1, stats.num_blocks),
        "num_requests_waiting": float(stats.num_waiting),
    }
    if form == "JSON":
        return {_HEADER: f"JSON {json.dumps({'named_metrics': metrics})}"}
    named = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
    return {_HEADER: f"TEXT {named}"}
