"""Stop strings against a naive search over the whole text, character by character."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_core.text.stop import StopMatcher, StopStrings, stop_strings


def naive(text: str, stops: list[str], include_stop: bool) -> tuple[str, str]:
    """The shown text and the stop string found, if any."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include_stop else end - len(longest)], longest
    return text, ""


def may_begin_stop(text: str, stops: list[str]) -> bool:
    return any(text.endswith(stop[:i]) for stop in stops for i in range(1, len(stop)))


SMALL = st.text("ab", min_size=1, max_size=6)


@given(
    pieces=st.lists(st.text("ab", max_size=5), max_size=12),
    stops=st.lists(SMALL, min_size=1, max_size=4),
    include_stop=st.booleans(),
)
def test_equals_a_naive_search(pieces: list[str], stops: list[str], include_stop: bool) -> None:
    matcher = StopMatcher(StopStrings(stops), include_stop)
    shown = ""
    received = ""
    for piece in pieces:
        shown += matcher.push(piece)
        received += piece
        if matcher.matched:
            break
        assert received.startswith(shown)
        # Nothing is held back without need, and nothing shown that may be cut off.
        held = received[len(shown) :]
        assert bool(held) == (may_begin_stop(received, stops) and not include_stop)
        assert not held or any(stop.startswith(held) for stop in stops)
    else:
        shown += matcher.flush()
    assert (shown, matcher.matched) == naive("".join(pieces), stops, include_stop)


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["###"], "a#b##c###d", "a#b##c", "###"),
        (["\n\n", "\n\nUser"], "one\n\nUser", "one", "\n\n"),
        (["bc", "abcd"], "xabcd", "xa", "bc"),
        (["aab"], "aaaab", "aa", "aab"),
        (["né"], "le café né", "le café ", "né"),
    ],
)
def test_known_cases(stops: list[str], text: str, shown: str, matched: str) -> None:
    matcher = StopMatcher(StopStrings(stops))
    assert "".join(matcher.push(char) for char in text if not matcher.matched) == shown
    assert matcher.matched == matched


def test_a_long_repetitive_stop_string_costs_linear_time() -> None:
    matcher = StopMatcher(StopStrings(["a" * 20_000 + "b"]))
    start = time.thread_time()
    shown = "".join(matcher.push("aaaa") for _ in range(20_000))
    assert len(shown) == 60_000
    assert time.thread_time() - start < 5.0


def test_text_without_a_stop_character_passes_through() -> None:
    matcher = StopMatcher(StopStrings(["xyz"]))
    text = "nothing of the kind"
    assert matcher.push(text) is text


@pytest.mark.parametrize(("stops", "is_here"), [(["x"] * 1024, True), (["x" * 1025], False)])
def test_many_characters_are_linked_in_a_thread(
    stops: list[str], is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def link(self: StopStrings) -> None:
        threads.append(threading.current_thread())

    monkeypatch.setattr(StopStrings, "_link", link)
    assert asyncio.run(stop_strings(stops)) is not None
    assert (threads == [threading.current_thread()]) == is_here
    assert asyncio.run(stop_strings(())) is None
