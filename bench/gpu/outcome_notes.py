"""A pytest plugin that notes each test's outcome at once, for ``bench.gpu.tests``.

It leaves out the tests that the file named by GPU_TESTS_DONE lists, and ends the process where a
test has left a device that can't be used any more.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

NOTES, DONE = "GPU_TESTS_NOTES", "GPU_TESTS_DONE"
LOST_DEVICE = 70
"""Exit code."""


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
    if _is_device_lost():
        _note("ended", nodeid)
        sys.stdout.flush()
        os._exit(LOST_DEVICE)


def pytest_sessionfinish() -> None:
    _note("finished", "")


def _is_device_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the device is lost: {error}")
        return True
    return False


def _note(outcome: str, nodeid: str) -> None:
    with open(os.environ[NOTES], "a") as file:
        file.write(f"{outcome}\t{nodeid}\n")
