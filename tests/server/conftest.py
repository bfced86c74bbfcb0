"""Reports what the watchdog of the servers' loops has seen."""

from __future__ import annotations

from typing import Any

from tests.server.watchdog import longest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for what, hold in longest.items():
        if hold.seconds:
            line = (
                f"longest {what} of a server's loop: {hold.seconds * 1000:.1f} ms in {hold.stack}"
            )
            terminalreporter.write_line(line)
