"""The examples run as their first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lmi_core.config.resolve import examine
from tests.cli.test_native import serving

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_batch() -> None:
    assert run("batch.py").splitlines()[-1] == "What is 7 + 5? 7 + 5 = 12"


def test_stream() -> None:
    with serving() as url:
        assert run("stream.py", url, "What is 7 + 5?") == "7 + 5 = 12\n"


def test_container() -> None:
    report = examine([str(EXAMPLES / "container")], {})
    assert not report.errors
    assert not report.warnings


def test_all_are_tested() -> None:
    tested = Path(__file__).read_text()
    assert all(path.name in tested for path in EXAMPLES.glob("*.py"))
