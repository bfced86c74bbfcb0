"""Files that are mapped, as arrays."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from lmi_core._native import MappedFile, NativeError


def test_arrays_are_read_only_views_that_keep_the_mapping(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 100)
    mapped = MappedFile(str(path))
    assert mapped.size == 25600
    array = mapped.array(256, 512)
    del mapped
    gc.collect()
    np.testing.assert_array_equal(array, np.arange(512, dtype=np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_dropped_pages_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * 10_000)
    mapped = MappedFile(str(path))
    mapped.drop(5000, 5000)
    assert bytes(mapped.array(4999, 2)) == b"xx"


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    assert MappedFile(str(path)).array(0, 0).size == 0


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    with pytest.raises(NativeError, match=f"can't open {path}: No such file"):
        MappedFile(str(path))
    path.write_bytes(b"abc")
    with pytest.raises(NativeError, match=f"2 bytes at 2 are not in {path} of 3 bytes"):
        MappedFile(str(path)).array(2, 2)
