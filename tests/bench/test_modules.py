"""That commands of bench, which nothing else imports, keep up with what they use and are listed."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import bench

MODULES = [module.name for module in pkgutil.walk_packages(bench.__path__, "bench.")]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports(name: str) -> None:
    importlib.import_module(name)


def test_the_readme_names_every_module_and_folder() -> None:
    """Modules of ``kernels`` each, of other folders the folder."""
    root = Path(bench.__file__).parent
    modules = {path.name for path in root.glob("*.py")} - {"__init__.py"}
    kernels = {f"kernels/{path.name}" for path in (root / "kernels").glob("[a-z]*.py")}
    folders = {f"{path.name}/" for path in root.iterdir() if path.is_dir() and any(path.iterdir())}
    expected = modules | kernels | folders - {"kernels/", "__pycache__/"}
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", (root / "README.md").read_text()))
    assert named - {"lmi_core/bench/", "train.py", "evaluate.py"} == expected
