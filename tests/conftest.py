"""Every session holds "honoured" to its word: the tests that options cite set their keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.config.citations import Citations


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Citations(config), "citations")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with item.config.pluginmanager.get_plugin("citations").recording(item):
        return (yield)
