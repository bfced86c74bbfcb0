"""What passed whole under the race finder is left out where it is asked for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import watched
from tests.config.citations import cited_tests

CITED = min(min(cited_tests().values()))


def names_left(names: list[str]) -> list[str]:
    """Of a session that collected tests with these names."""
    gone: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: gone.extend(items))
    config: Any = SimpleNamespace(hook=hook)
    items: list[Any] = [SimpleNamespace(nodeid=name) for name in names]
    watched.Watched(config).pytest_collection_modifyitems(config, items)
    assert sorted(item.nodeid for item in (*items, *gone)) == sorted(names)
    return [item.nodeid for item in items]


def test_what_passed_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["t.py::a[native-cpu]", "t.py::a[torch-cpu]", f"{CITED}[1]"]
    monkeypatch.setattr(watched, "IS_WATCHED", False)
    monkeypatch.delenv("LMI_TEST_LEAVE_OUT", raising=False)
    assert names_left(names) == names
    notes = tmp_path / "watched.txt"
    notes.write_text(f"t.py::a[native-cpu]\n{CITED}[1]\n")
    monkeypatch.setenv("LMI_TEST_LEAVE_OUT", str(notes))
    assert names_left(names) == names[1:], "each case of a cited test is needed for its verdict"
    monkeypatch.setattr(watched, "IS_WATCHED", True)
    assert names_left(names) == names


def test_what_shows_less_is_not_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(watched, "IS_WATCHED", True)
    monkeypatch.setattr(watched, "NOTES", tmp_path / "build/watched.txt")
    monkeypatch.setattr(watched, "_running", [])
    plugin: Any = watched.Watched(SimpleNamespace())  # type: ignore[arg-type]
    for name, asks, outcome in (
        ("t.py::whole", False, "passed"),
        ("t.py::less", True, "passed"),
        ("t.py::skipped", False, "skipped"),
    ):
        item = SimpleNamespace(user_properties=[])
        running = plugin.pytest_runtest_protocol(item)
        next(running)
        if asks:
            assert watched.shows_less()
        report = SimpleNamespace(
            when="call",
            passed=outcome == "passed",
            user_properties=item.user_properties,
            nodeid=name,
        )
        plugin.pytest_runtest_logreport(report)
    plugin.pytest_sessionfinish()
    assert (tmp_path / "build/watched.txt").read_text() == "t.py::whole\n"
