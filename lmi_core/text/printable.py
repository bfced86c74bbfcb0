"""Text of others in a line that people read."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape what could move a terminal's cursor, end the line or can't be encoded."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
