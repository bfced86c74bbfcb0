"""Objects as JSON, in pieces."""

from __future__ import annotations

import json
from json import JSONEncoder

import pytest

from lmi_server.dialects.encode import Shown, encoded


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": [], "b": {}, "é": None},
        [[{"x": 1.5, "y": '\n"é'}] * 3, [True, None]],
        {"long": list(range(1000)), "after": [{"deep": [["a"] * 129, []]}] * 64},
        [{"i": i, "top": {str(j): -0.25 for j in range(5)}} for i in range(200)],
        [{"choice": i, "tokens": [{"top": [i, {}]}] * 70} for i in range(66)],
        "text",
        7,
    ],
)
def test_the_bytes_are_those_of_one_piece(value: object) -> None:
    assert encoded(value) == json.dumps(value, ensure_ascii=False).encode()
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert encoded(value, compact=True) == compact.encode()


@pytest.mark.parametrize("num_items", [0, 1, 64, 200])
@pytest.mark.parametrize("num_choices", [1, 65])
def test_what_is_shown_is_encoded_and_gone(num_items: int, num_choices: int) -> None:
    shown = [Shown(list(range(num_items)), lambda i: {"i": [i]}) for _ in range(num_choices)]
    expected = [{"a": [{"i": [i]} for i in range(num_items)], "b": 1}] * num_choices
    value = [{"a": each, "b": 1} for each in shown]
    assert encoded(value) == json.dumps(expected).encode()
    assert not any(each.items for each in shown)


def test_what_is_shown_is_not_there_at_once() -> None:
    """Else a collection behind it would look at all of it, with the lock held."""
    encoded(Shown(list(range(1000)), lambda number: [_Made([number])]))
    assert 0 < _Made.most < 200


@pytest.mark.parametrize("num_items", [0, 1, 65])
def test_an_iterators_items_are_encoded_one_at_a_time(num_items: int) -> None:
    _Made.most = 0
    items = ({"a": [_Made([i])] * 70} for i in range(num_items))
    expected = [{"a": [[i]] * 70} for i in range(num_items)]
    assert encoded({"items": items, "n": 1}) == json.dumps({"items": expected, "n": 1}).encode()
    assert _Made.most <= 2


class _Made(list[int]):
    """Counts how many there are."""

    num_alive = most = 0

    def __init__(self, items: list[int]) -> None:
        super().__init__(items)
        _Made.num_alive += 1
        _Made.most = max(_Made.most, _Made.num_alive)

    def __del__(self) -> None:
        _Made.num_alive -= 1


def test_no_call_encodes_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where each of many choices is long."""
    encode, lengths = JSONEncoder.encode, []

    def spy(self: JSONEncoder, value: object) -> str:
        lengths.append(len(text := encode(self, value)))
        return text

    tokens = [{"token": "a", "bytes": [97]}] * 500
    choices = [{"index": i, "tokens": tokens, "shown": Shown([1] * 500, str)} for i in range(128)]
    monkeypatch.setattr(JSONEncoder, "encode", spy)
    assert len(encoded(choices)) > 2_000_000
    assert max(lengths) < 4096
