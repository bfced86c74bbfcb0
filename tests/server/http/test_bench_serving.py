"""The load generator against a scripted server process."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.server.test_process import running

OPTIONS = "--concurrency 20 --seconds 1 --abort 0.4 --max-new-tokens 8"


def test_load_with_aborts() -> None:
    with running(delay_s=0.002) as process:
        url = f"http://127.0.0.1:{process.port}"
        result = subprocess.run(
            [sys.executable, "bench/serving.py", "--url", url, "--json", *OPTIONS.split()],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures["completed"] > 20
    assert figures["aborted"] > 5
    assert figures["failed"] == 0
    assert figures["tokens"] >= 8 * figures["completed"]
    assert figures["left_over"] == {"running": 0, "waiting": 0, "used blocks": 0}
