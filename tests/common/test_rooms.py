"""Folders of ``lmi_core`` import only what lies below them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "lmi_core"
BELOW_ALL = {"errors", "progress", "units", "version", "_native"}
FROM_THE_GROUND = (
    {"sandbox", "settings"},
    {"text", "structured", "tools"},
    {"weights"},
    {"ops"},
    {"models"},
    {"adapters"},
    {"runners"},
    {"engine"},
    {"backends", "custom_code"},
    {"config"},
)


def imported_rooms(path: Path) -> set[str]:
    """The folders and modules of ``lmi_core`` that a file imports, also within functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "lmi_core":
            names += [f"lmi_core.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.append(node.module)
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return {name.split(".")[1] for name in names if name.startswith("lmi_core.")} - BELOW_ALL


@pytest.mark.parametrize("floor", range(len(FROM_THE_GROUND)))
def test_imports_point_down(floor: int) -> None:
    allowed = set().union(*FROM_THE_GROUND[: floor + 1])
    paths = [path for room in FROM_THE_GROUND[floor] for path in (ROOT / room).rglob("*.py")]
    found = {path.name: imported_rooms(path) - allowed for path in paths}
    assert not {name: above for name, above in found.items() if above}
