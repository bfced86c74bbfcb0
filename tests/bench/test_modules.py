"""That commands of bench, which nothing else imports, keep up with what they use."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import bench

MODULES = [module.name for module in pkgutil.walk_packages(bench.__path__, "bench.")]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports(name: str) -> None:
    importlib.import_module(name)
