"""``lmi top``: what a running server does, from its metrics, a screen every few seconds."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from lmi_core.bench.roofs import LEAST_WEIGHT_BYTES, measure_read_gb_per_s
from lmi_core.errors import UserError
from lmi_core.http_url import HttpUrl, key_header, refused_key

_CLEAR = "\033[H\033[2J"
_BAR_WIDTH = 30
_INDENT = 11
_STALE_S = 5.0
_MOST_GB_PER_S = 1e5
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A server's samples at a time in seconds."""

    at_s: float
    samples: Mapping[tuple[str, Labels], float]

    @classmethod
    def parse(cls, at_s: float, text: str) -> Snapshot:
        """From Prometheus' text form."""
        return cls(
            at_s,
            {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            },
        )

    def get(self, name: str, **labels: str) -> float:
        """A sample's value, 0 where there is none."""
        return self.samples.get((name, tuple(sorted(labels.items()))), 0.0)

    @property
    def models(self) -> list[str]:
        names = (dict(labels) for name, labels in self.samples if name == "lmi_running_sequences")
        return sorted(labels["model_name"] for labels in names)

    def buckets(self, family: str, model: str) -> list[tuple[float, float]]:
        """Upper bounds and cumulative counts, ascending."""
        found = []
        for (name, labels), value in self.samples.items():
            pairs = dict(labels)
            if name == f"{family}_bucket" and pairs.get("model_name") == model:
                found.append((float(pairs["le"]), value))
        return sorted(found)


@dataclass(slots=True)
class ModelView:
    """One model between two snapshots; rates are per second, times in milliseconds."""

    name: str
    running: int
    waiting: int
    kv_blocks: dict[str, int]
    rates: dict[str, float]
    cached_share: float | None
    """Of prompt tokens that came."""
    kernel_share: float | None
    """Of the steps' time that the worker computed."""
    read_gb_per_s: float | None = None
    """Of weights, by kernels; None: nothing ran, or the weights may stay in caches."""
    roof_share: float | None = None
    """The same of what the machine can; None: that isn't known, either."""
    latency_ms: dict[str, tuple[float, float] | None] = field(default_factory=dict)
    """Median and 99 % of what ended since the last snapshot; None: nothing did."""


_RATES = {
    "requests": "lmi_requests_total",
    "prompt tokens": "lmi_prompt_tokens_total",
    "generated tokens": "lmi_generated_tokens_total",
    "steps": "lmi_steps_total",
    "preemptions": "lmi_preemptions_total",
}
_LATENCIES = {
    "first token": "lmi_time_to_first_token_seconds",
    "between tokens": "lmi_inter_token_latency_seconds",
    "queue": "lmi_request_queue_seconds",
    "whole request": "lmi_request_seconds",
}


_ROOF_HELP = """GB/s that the server's machine reads from memory, or here: it is this one, measured
first (a second or two, best while the server is idle); shows the share that reading weights is"""


def view(before: Snapshot, after: Snapshot, model: str, roof_gb_per_s: float = 0.0) -> ModelView:
    """What one model did between two snapshots of its server; a roof of 0 isn't known."""
    seconds = max(1e-9, after.at_s - before.at_s)

    def change(name: str) -> float:
        # A model that was loaded anew counts from 0.
        return max(0.0, after.get(name, model_name=model) - before.get(name, model_name=model))

    prompt = change("lmi_prompt_tokens_total")
    step_s = change("lmi_step_seconds_sum")
    kernel_s = change("lmi_native_step_seconds_sum")
    num_bytes = change("lmi_read_weight_bytes_total")
    is_from_memory = num_bytes >= LEAST_WEIGHT_BYTES * max(1.0, change("lmi_steps_total"))
    read = num_bytes / kernel_s * 1e-9 if kernel_s and is_from_memory else None
    states = ("used", "cached", "free")
    return ModelView(
        name=model,
        running=int(after.get("lmi_running_sequences", model_name=model)),
        waiting=int(after.get("lmi_waiting_requests", model_name=model)),
        kv_blocks={
            state: int(after.get("lmi_kv_blocks", model_name=model, state=state))
            for state in states
        },
        rates={name: change(counter) / seconds for name, counter in _RATES.items()},
        cached_share=change("lmi_cached_prompt_tokens_total") / prompt if prompt else None,
        kernel_share=kernel_s / step_s if step_s else None,
        read_gb_per_s=read,
        roof_share=read / roof_gb_per_s if read is not None and roof_gb_per_s else None,
        latency_ms={
            name: _quantiles(before.buckets(family, model), after.buckets(family, model))
            for name, family in _LATENCIES.items()
        },
    )


def _quantiles(
    before: list[tuple[float, float]], after: list[tuple[float, float]]
) -> tuple[float, float] | None:
    earlier = dict(before)
    counts = [(bound, count - earlier.get(bound, 0.0)) for bound, count in after]
    if not counts or counts[-1][1] <= 0:
        return None
    return 1e3 * _quantile(counts, 0.5), 1e3 * _quantile(counts, 0.99)


def _quantile(counts: list[tuple[float, float]], share: float) -> float:
    """In proportion within a bucket, as Prometheus' histogram_quantile; the last bound at most."""
    wanted, low, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            if bound == float("inf"):
                return low
            part = (wanted - below) / (count - below) if count > below else 1.0
            return low + (bound - low) * part
        low, below = bound, count
    return low


def screen(url: HttpUrl, snapshot: Snapshot, views: Iterable[ModelView]) -> str:
    """The views as lines of text."""
    version = next(
        (dict(labels)["version"] for name, labels in snapshot.samples if name == "lmi_build_info"),
        "?",
    )
    num_inside = int(snapshot.get("lmi_http_requests_in_flight"))
    lines = [f"{url}  lmi {version}  {num_inside} requests in flight"]
    for each in views:
        lines += ["", *_model_lines(each)]
    return "\n".join(lines) + "\n"


def _model_lines(each: ModelView) -> list[str]:
    blocks = each.kv_blocks
    total = sum(blocks.values())
    bar = ""
    if total:
        used, cached = (round(_BAR_WIDTH * blocks[s] / total) for s in ("used", "cached"))
        bar = "#" * used + "+" * min(cached, _BAR_WIDTH - used)
    rates = [f"{_short(value)} {name}/s" for name, value in each.rates.items()]
    lines = [
        each.name,
        f"  batch    {each.running} sequences run, {each.waiting} requests wait",
        f"  blocks   [{bar:<{_BAR_WIDTH}}] {blocks['used']} used (#), {blocks['cached']} cached (+)"
        f" of {total}",
        f"  rates    {'  '.join(rates[:3])}",
        f"           {'  '.join(rates[3:])}",
    ]
    shares = {
        "of prompts from the cache": each.cached_share,
        "of a step in kernels": each.kernel_share,
    }
    known = [f"{share:.0%} {name}" for name, share in shares.items() if share is not None]
    if known:
        lines.append(f"  shares   {', '.join(known)}")
    if each.read_gb_per_s is not None:
        share = "" if each.roof_share is None else f", {each.roof_share:.0%} of the machine's roof"
        lines.append(f"  memory   {each.read_gb_per_s:.1f} GB/s of weights by kernels{share}")
    for name, pair in each.latency_ms.items():
        if pair is not None:
            lines.append(f"  {name:<15} median {pair[0]:,.1f} ms, 99 % {pair[1]:,.1f} ms")
    return lines


def _short(value: float) -> str:
    """To three digits at least."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def read(url: HttpUrl) -> Snapshot:
    """Raises UserError where no server of ours answers, or it wants another key."""
    kind = http.client.HTTPSConnection if url.is_https else http.client.HTTPConnection
    try:
        with closing(kind(url.host, url.port, timeout=_STALE_S)) as connection:
            connection.request("GET", f"{url.path}/metrics", headers=key_header())
            answer = connection.getresponse()
            text = answer.read().decode()
    except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
        raise UserError(f"{url} can't be read: {error}", field="URL") from None
    if answer.status == 401:
        raise refused_key(f"{url}/metrics")
    other = f"{url}/metrics answered {answer.status}, and not as this server does"
    if answer.status != 200 or "lmi_" not in text:
        raise UserError(other)
    try:
        return Snapshot.parse(time.monotonic(), text)
    except ValueError:
        raise UserError(other) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8080")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--once", action="store_true", help="print one interval and end")
    parser.add_argument("--json", action="store_true", help="a line of JSON per interval")
    parser.add_argument("--roof", metavar="GB/S", help=_ROOF_HELP)


def top(args: argparse.Namespace) -> int:
    """Show the server until Ctrl-C; off a terminal, screens one below the other."""
    if not 0.05 <= args.interval <= 3600:
        raise UserError(f"--interval must be 0.05 to 3600, got {args.interval:g}")
    url, roof = HttpUrl.parse(args.url), _roof(args.roof)
    before = read(url)
    is_live = sys.stdout.isatty() and not args.once and not args.json
    while True:
        time.sleep(args.interval)
        after = read(url)
        views = [view(before, after, model, roof) for model in after.models]
        if args.json:
            sys.stdout.write(json.dumps(_as_json(views)) + "\n")
        else:
            text = screen(url, after, views)
            sys.stdout.write((_CLEAR + _cut(text)) if is_live else text)
        sys.stdout.flush()
        if args.once:
            return 0
        before = after


def _roof(text: str | None) -> float:
    """In GB/s; 0: unknown."""
    if text == "here":
        from lmi_core import _native

        level = _native.default_instruction_set()
        return measure_read_gb_per_s(_native.num_physical_cores(), level)
    with contextlib.suppress(ValueError):
        if text is None or 0 < float(text) <= _MOST_GB_PER_S:
            return float(text or 0)
    raise UserError(
        f"--roof must be here, or above 0 and at most {_MOST_GB_PER_S:g} GB/s, got {text}"
    )


def _as_json(views: Iterable[ModelView]) -> list[dict[str, Any]]:
    return [asdict(each) for each in views]


def _cut(text: str) -> str:
    """To the terminal's size, so that nothing scrolls; what is too wide goes on below itself."""
    columns, rows = shutil.get_terminal_size()
    lines = [part for line in text.splitlines() for part in _fold(line, columns)]
    return "\n".join(lines[: rows - 1]) + "\n"


def _fold(line: str, columns: int) -> list[str]:
    indent = " " * _INDENT if line.startswith(" ") else ""
    parts = textwrap.wrap(
        line, max(columns, 2 * _INDENT), subsequent_indent=indent, drop_whitespace=True
    )
    return [part[:columns] for part in parts] or [""]
