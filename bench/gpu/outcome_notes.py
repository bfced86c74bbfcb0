"""A pytest plugin that notes each test's outcome at once, for ``bench.gpu.tests``.

It leaves out the tests that the file named by GPU_TESTS_DONE lists, and ends the process where a
test has left a device that can't be used any more.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.gpu import lost_device

NOTES, DONE = "GPU_TESTS_NOTES", "GPU_TESTS_DONE"


def read(notes: Path) -> tuple[dict[str, str], bool]:
    """Outcomes by test, and whether the process came to its end. ``ended``: it did in the test, or
    right after it."""
    lines = [line.split("\t") for line in notes.read_text().splitlines()]
    outcomes = {test: outcome for outcome, test in lines if test}
    return outcomes, ["finished", ""] in lines


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    done = set(Path(os.environ[DONE]).read_text().splitlines())
    items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    _note("ended", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _note(report.outcome, report.nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    if lost_device.is_lost():
        _note("ended", nodeid)
        sys.stdout.flush()
        os._exit(lost_device.EXIT_CODE)


def pytest_sessionfinish() -> None:
    _note("finished", "")


def _note(outcome: str, nodeid: str) -> None:
    with open(os.environ[NOTES], "a") as file:
        file.write(f"{outcome}\t{nodeid}\n")
