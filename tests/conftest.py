"""Every session holds "honoured" to its word: the tests that options cite set their keys."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from tests.config.citations import Citations
from tests.triton_interpreter import quicken
from tests.watched import Watched


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("hypothesispytest"):  # a machine with a GPU may lack it
        from hypothesis import settings

        # How long an example takes says how busy the machine is.
        settings.register_profile("no deadline", deadline=None)
        settings.load_profile("no deadline")
    config.pluginmanager.register(Citations(config), "citations")
    config.pluginmanager.register(Watched(config), "watched")
    if os.environ.get("TRITON_INTERPRET") == "1":
        quicken()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Imports and collected tests stay: looking for garbage in them took a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that no worker is left with one while the others have nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with item.config.pluginmanager.get_plugin("citations").recording(item):
        return (yield)
