"""A suite's figures in few words, and as one file."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ARCHIVE = "results.tar.gz"


def summarize(out_dir: Path, records: Sequence[Mapping[str, Any]]) -> str:
    """A line for each row of results, also written to summary.txt."""
    lines = []
    for record in records:
        errors = f", {record['num_errors']} errors" if "num_errors" in record else ""
        lines.append(f"{record['name']}: {record['status']}, {record.get('seconds', 0)} s{errors}")
        path = out_dir / f"{record['name']}.json"
        if path.exists():
            lines += [f"  {_line(row)}" for row in _rows(json.loads(path.read_text()))]
    text = "\n".join(lines)
    (out_dir / "summary.txt").write_text(text + "\n")
    return text


def judge(out_dir: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The record with the number of its rows without a figure; where that is all of them, a stage
    that went well has failed."""
    path = out_dir / f"{record['name']}.json"
    rows = _rows(json.loads(path.read_text())) if path.exists() else []
    num_errors = sum("error" in row for row in rows)
    if num_errors == 0:
        return record
    has_nothing = record["status"] == "ok" and num_errors == len(rows)
    return {
        **record,
        "num_errors": num_errors,
        "status": "failed" if has_nothing else record["status"],
    }


def _rows(written: Any) -> list[dict[str, Any]]:
    return [written] if isinstance(written, dict) else list(written)


def _line(row: Mapping[str, Any]) -> str:
    named = f"{row['file']} ({row['part']})" if "file" in row else str(row.get("what", "rates"))
    if "outcomes" in row:
        outcomes = list(row["outcomes"].values())
        counts = {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)}
        wrong = [
            test for test, outcome in row["outcomes"].items() if outcome in ("failed", "ended")
        ]
        return f"{named}: {counts} {row.get('error', '')} {' '.join(wrong[:5])}".rstrip()
    figures = [
        f"{name} {value:.4g}" for name, value in row.items() if isinstance(value, (int, float))
    ]
    texts = [f"{name}: {row[name]}" for name in ("error", "skipped", "heaviest") if name in row]
    texts = [text for text in texts if text not in figures]
    return f"{named}: {', '.join([*figures, *texts])}"


def archive(out_dir: Path) -> Path:
    """All files of the directory as one beside them."""
    target = out_dir / ARCHIVE
    with tarfile.open(target, "w:gz", compresslevel=1) as packed:
        for path in sorted(out_dir.iterdir()):
            if path.name != ARCHIVE:
                packed.add(path, path.name)
    return target
