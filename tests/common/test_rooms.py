"""Folders of ``lmi_core`` import only what lies below them; no modules import in a circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOT = REPOSITORY / "lmi_core"
BELOW_ALL = {"errors", "files", "progress", "units", "version", "_native"}
FROM_THE_GROUND = (
    {"sandbox", "settings"},
    {"text", "structured", "tools"},
    {"weights"},
    {"ops"},
    {"models"},
    {"calibration"},
    {"adapters"},
    {"runners"},
    {"engine"},
    {"backends", "copies", "custom_code"},
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


def imports(root: Path, package: str) -> dict[str, set[str]]:
    """Of each module, those of the same package that it imports: within functions too, and for
    types alone."""
    paths = {}
    for path in (*root.rglob("*.py"), *root.rglob("_native.pyi")):
        parts = path.relative_to(root).with_suffix("").parts
        paths[".".join((package, *parts)).removesuffix(".__init__")] = path
    return {name: _imported(path, set(paths)) - {name} for name, path in paths.items()}


def _imported(path: Path, modules: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of imports, empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


@pytest.mark.parametrize(("folder", "package"), [("server", "lmi_server"), ("lmi_core",) * 2])
def test_modules_import_in_no_circle(folder: str, package: str) -> None:
    assert circle(imports(REPOSITORY / folder, package)) == []


def test_a_circle_is_found_also_of_types_alone(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from typing import TYPE_CHECKING\nfrom p import b\n")
    (tmp_path / "b.py").write_text("if TYPE_CHECKING:\n    from p.c import C\n")
    (tmp_path / "c.py").write_text("def f():\n    import p.a\n")
    assert set(circle(imports(tmp_path, "p"))) == {"p.a", "p.b", "p.c"}
    (tmp_path / "c.py").write_text("")
    assert circle(imports(tmp_path, "p")) == []
