"""Rows of block tables."""

import pytest

from lmi_core._native import BlockTables, NativeError


def test_rows_are_set_grown_and_cleared() -> None:
    tables = BlockTables(2, 3)
    tables.set(0, [4, 5])
    tables.append(0, (6,))
    assert tables.row(0) == [4, 5, 6]
    assert tables.row(1) == []
    tables.clear(0)
    assert tables.row(0) == []


def test_what_does_not_fit_is_refused() -> None:
    tables = BlockTables(2, 3)
    with pytest.raises(NativeError, match="would have 4 blocks, 3 fit"):
        tables.set(0, [1, 2, 3, 4])
    with pytest.raises(NativeError, match="row 2 of 2"):
        tables.row(2)
