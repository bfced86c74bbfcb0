"""Parts of messages."""

from __future__ import annotations

import gc

import numpy as np

from lmi_core.sandbox import message


def test_parts_may_be_in_a_cycle() -> None:
    """A task that failed has its frames in one. Of an io.BytesIO's buffer in it, Python 3.12.1's
    collector crashes, and 3.13.0's raises a BufferError wherever it happens to run.
    """
    array = np.arange(100_000)
    parts = message.encode({"text": "x" * 100_000, "array": array})
    assert isinstance(parts[0], bytes)
    taken = message.decode([bytearray(part) for part in parts])
    np.testing.assert_array_equal(taken["array"], array)
    cycle: list[object] = [*parts]
    cycle.append(cycle)
    del cycle, parts
    gc.collect()
