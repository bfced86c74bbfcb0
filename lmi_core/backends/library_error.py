"""What another library's errors say, short enough for ours."""

from __future__ import annotations

_MAX_CHARS = 400


def reason_of(error: Exception) -> str:
    """The error's text on one line."""
    return " ".join(str(error).split())[:_MAX_CHARS]
