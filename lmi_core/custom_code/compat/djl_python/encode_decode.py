"""Bodies by content type (DJL-Serving's djl_python/encode_decode.py)."""

from __future__ import annotations

import csv
import io
from typing import Any

from .inputs import Input
from .outputs import Output

_TEXT_COLUMNS = ("question", "context", "inputs")


def decode(inputs: Input, content_type: str | None, key: str | None = None) -> Any:
    """The body as what its content type says; JSON when there is none."""
    kind = content_type or ""
    if not kind:
        return inputs.get_as_json(key) if inputs.get_as_bytes(key) else {"inputs": ""}
    if "application/json" in kind:
        return inputs.get_as_json(key)
    if "text/csv" in kind:
        return _decode_csv(inputs.get_as_string(key) or "")
    if "text/plain" in kind:
        return {"inputs": [inputs.get_as_string(key)]}
    if kind.startswith("image/"):
        return {"inputs": inputs.get_as_image(key)}
    if "tensor/npz" in kind:
        return {"inputs": inputs.get_as_npz(key)}
    if "application/x-npy" in kind:
        return {"inputs": inputs.get_as_numpy(key)}
    if "application/x-www-form-urlencoded" in kind:
        return {"inputs": inputs.get_as_string(key)}
    return {"inputs": inputs.get_as_bytes(key)}


def encode(outputs: Output, prediction: Any, accept: str | None, key: str | None = None) -> None:
    """Add ``prediction`` in the form that the client accepts: an .npz archive, CSV, else JSON."""
    if accept and "tensor/npz" in accept:
        outputs.add_as_npz(prediction, key)
        outputs.add_property("Content-Type", "tensor/npz")
    elif accept and "text/csv" in accept:
        file = io.StringIO()
        rows = prediction if isinstance(prediction, list) else [prediction]
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)
        outputs.add_as_string(file.getvalue(), key)
        outputs.add_property("Content-Type", "text/csv")
    else:
        outputs.add_as_json(prediction, key)
        outputs.add_property("Content-Type", "application/json")


def _decode_csv(text: str) -> Any:
    reader = csv.DictReader(io.StringIO(text))
    columns = reader.fieldnames or []
    if not any(name in columns for name in _TEXT_COLUMNS):
        raise ValueError(
            f"the table's header is {', '.join(columns)[:200]!r}; it must name one of "
            f"{', '.join(_TEXT_COLUMNS)}"
        )
    rows = list(reader)
    if "inputs" in columns:
        return {"inputs": [row["inputs"] for row in rows]}
    return {"inputs": rows}
