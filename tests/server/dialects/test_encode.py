"""Objects as JSON, in pieces."""

from __future__ import annotations

import json

import pytest

from lmi_server.dialects.encode import encoded


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": [], "b": {}, "é": None},
        [[{"x": 1.5, "y": '\n"é'}] * 3, [True, None]],
        {"long": list(range(1000)), "after": [{"deep": [["a"] * 129, []]}] * 64},
        [{"i": i, "top": {str(j): -0.25 for j in range(5)}} for i in range(200)],
        "text",
        7,
    ],
)
def test_the_bytes_are_those_of_one_piece(value: object) -> None:
    assert encoded(value) == json.dumps(value, ensure_ascii=False).encode()
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert encoded(value, compact=True) == compact.encode()
