"""Rows as text that can be pasted."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from bench.peers.row import Row

HEADINGS = (
    *("shape", "dtype", "what", "peer", "format", "ours tok/s", "theirs tok/s"),
    *("ours / theirs (quartiles)", "first token", "per token", "of roof: ours", "theirs", "pairs"),
    *("date", "commit"),
)
CAPTION = (
    "Prefill: prompt tokens per second; decode and serve: generated tokens per second. "
    "First token and per token are time ratios, ours / theirs: less is better."
)


def markdown(rows: Sequence[Row]) -> str:
    """A Markdown table with its caption; rows without a pair are left out."""
    cells = [HEADINGS, tuple("---" for _ in HEADINGS), *(_cells(row) for row in rows if row.pairs)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + f"\n\n{CAPTION}\n"


def _cells(row: Row) -> tuple[str, ...]:
    ratio = row.ratio
    return (
        row.shape,
        row.dtype,
        row.what,
        row.peer + _how(row),
        row.peer_format,
        f"{statistics.median(pair.ours.tokens_per_s for pair in row.pairs):.1f}",
        f"{statistics.median(pair.theirs.tokens_per_s for pair in row.pairs):.1f}",
        f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f}){_verdict(row)}",
        _number(row.first_token_ratio),
        _number(row.per_token_ratio),
        _share(row, "ours"),
        _share(row, "theirs"),
        str(len(row.pairs)),
        row.pairs[-1].at[:10],
        row.commit,
    )


def _how(row: Row) -> str:
    """Where ours serves over HTTP and the peer has no server, it does without HTTP's cost."""
    over = row.theirs_about.get("over")
    return " (offline)" if row.ours_about.get("over") == "http" and over != "http" else ""


def _verdict(row: Row) -> str:
    return " within noise" if row.ratio.low < 1 < row.ratio.high else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _share(row: Row, side: str) -> str:
    shares = row.shares(side)
    return "-" if shares is None else f"{shares.median:.0%}"
