"""Tests that have just passed under the race finder, which needn't run again unwatched.

``make test-races`` notes them in ``build/watched.txt``, and a session leaves them out for which
``LMI_TEST_LEAVE_OUT`` names that file: that of ``make test`` in ``.ci/run``. Elsewhere all run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.config.citations import cited_tests

NOTES = Path(__file__).parents[1] / "build/watched.txt"
IS_WATCHED = bool(os.environ.get("LMI_TEST_RACES"))
_running: list[pytest.Item] = []


def shows_less() -> bool:
    """Whether kernels are watched; the test that asks shows less then, and runs unwatched too."""
    for item in _running if IS_WATCHED else ():
        item.user_properties.append(("shows", "less"))
    return IS_WATCHED


class Watched:
    """The plugin: it notes in sessions that are watched, and leaves out where it is told to."""

    def __init__(self, config: pytest.Config) -> None:
        self._is_worker = hasattr(config, "workerinput")
        self._passed: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _running[:] = [item]
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed and not report.user_properties:
            self._passed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if IS_WATCHED and not self._is_worker:
            NOTES.parent.mkdir(exist_ok=True)
            NOTES.write_text("".join(f"{name}\n" for name in sorted(self._passed)))

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        path = os.environ.get("LMI_TEST_LEAVE_OUT")
        if path is None or IS_WATCHED:
            return
        cited = frozenset().union(*cited_tests().values())  # of whose keys each case counts
        passed = set(Path(path).read_text().splitlines())
        gone = {name for name in passed if name.split("[")[0] not in cited}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in gone])
        items[:] = [item for item in items if item.nodeid not in gone]
