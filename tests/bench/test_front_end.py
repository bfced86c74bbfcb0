"""The front-end bench: a real server on the scripted engine, loaded for a moment."""

from __future__ import annotations

from bench.front_end import measure, row


def test_every_connection_gets_its_tokens() -> None:
    figures = measure(connections=3, tick_s=0.002, seconds=0.5)
    assert figures.failed == 0
    # All three requests of 1000 tokens are finished, however long that takes.
    assert figures.tokens % 1000 == 0
    assert figures.tokens >= 3000
    assert figures.server_cpu_s > 0
    assert row(figures).startswith("| 3 | 2 ms |")
