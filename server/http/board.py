"""The Grafana board of the metrics; ``python -m lmi_server.http.board`` prints it.

``server/deploy/grafana.json`` is its copy. Its variables are the data source and the model's name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

_RATE = "$__rate_interval"
_MODEL = 'model_name=~"$model"'


class Panel(NamedTuple):
    """A graph: its title, unit, and what it shows by legend."""

    title: str
    unit: str
    queries: Mapping[str, str]


def _quantiles(family: str) -> dict[str, str]:
    return {
        f"{share:.0%}": (
            f"histogram_quantile({share}, sum by (le) (rate({family}_bucket{{{_MODEL}}}[{_RATE}])))"
        )
        for share in (0.5, 0.9, 0.99)
    }


def _rate(counter: str) -> str:
    return f"sum(rate({counter}{{{_MODEL}}}[{_RATE}]))"


PANELS = (
    Panel("Time to first token", "s", _quantiles("lmi_time_to_first_token_seconds")),
    Panel("Between tokens", "s", _quantiles("lmi_inter_token_latency_seconds")),
    Panel("Whole request", "s", _quantiles("lmi_request_seconds")),
    Panel("In the queue", "s", _quantiles("lmi_request_queue_seconds")),
    Panel(
        "Tokens",
        "short",
        {
            "prompt/s": _rate("lmi_prompt_tokens_total"),
            "from the prefix cache/s": _rate("lmi_cached_prompt_tokens_total"),
            "generated/s": _rate("lmi_generated_tokens_total"),
        },
    ),
    Panel(
        "Requests that ended",
        "reqps",
        {
            "{{reason}}": (
                f"sum by (reason) (rate(lmi_finished_requests_total{{{_MODEL}}}[{_RATE}]))"
            )
        },
    ),
    Panel(
        "In flight",
        "short",
        {
            "sequences that run": f"sum(lmi_running_sequences{{{_MODEL}}})",
            "requests that wait": f"sum(lmi_waiting_requests{{{_MODEL}}})",
            "inside the server": "sum(lmi_http_requests_in_flight)",
        },
    ),
    Panel("KV blocks", "short", {"{{state}}": f"sum by (state) (lmi_kv_blocks{{{_MODEL}}})"}),
    Panel("Prompt length", "short", _quantiles("lmi_request_prompt_tokens")),
    Panel("Output length", "short", _quantiles("lmi_request_generated_tokens")),
    Panel("Step", "s", _quantiles("lmi_step_seconds")),
    Panel(
        "Answers by status",
        "reqps",
        {"{{status}}": f"sum by (status) (rate(lmi_http_requests_total[{_RATE}]))"},
    ),
    Panel(
        "Preemptions and failed steps",
        "short",
        {
            "preemptions/s": _rate("lmi_preemptions_total"),
            "failed steps/s": _rate("lmi_failed_steps_total"),
        },
    ),
    Panel(
        "Event loop's lag",
        "s",
        {
            "99 %": (
                "histogram_quantile(0.99, sum by (le) "
                f"(rate(lmi_event_loop_lag_seconds_bucket[{_RATE}])))"
            )
        },
    ),
)
_WIDTH, _HEIGHT = 12, 8
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def board() -> dict[str, Any]:
    """The board as Grafana imports it."""
    return {
        "title": "lmi",
        "uid": "lmi",
        "tags": ["lmi"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                },
                {
                    "name": "model",
                    "label": "Model",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": "label_values(lmi_running_sequences, model_name)",
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                },
            ]
        },
        "panels": [_panel(i, panel) for i, panel in enumerate(PANELS)],
    }


def _panel(i: int, panel: Panel) -> dict[str, Any]:
    return {
        "id": i + 1,
        "title": panel.title,
        "type": "timeseries",
        "datasource": _SOURCE,
        "gridPos": {"x": _WIDTH * (i % 2), "y": _HEIGHT * (i // 2), "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + n), "expr": query, "legendFormat": legend}
            for n, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def board_text() -> str:
    return json.dumps(board(), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(board_text())
