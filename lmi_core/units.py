"""Numbers of bytes and seconds as people read them."""

from __future__ import annotations


def megabytes(num_bytes: float) -> str:
    """In MiB, or in GiB from one on: three digits or so."""
    if num_bytes < 1 << 30:
        value, unit = num_bytes / 2**20, "MiB"
    else:
        value, unit = num_bytes / 2**30, "GiB"
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"


def clock(seconds: float) -> str:
    """As minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
