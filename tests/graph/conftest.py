"""The worker that replays graphs."""

from collections.abc import Iterator

import pytest

from lmi_core import _native


@pytest.fixture
def worker() -> Iterator[_native.Worker]:
    worker = _native.Worker(2)
    yield worker
    worker.close()
