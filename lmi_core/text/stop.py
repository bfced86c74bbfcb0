"""Stop strings: found across token boundaries, never shown in part unless they stay in the text."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_INLINE_CHARS = 1024


class StopStrings:
    """An automaton over several stop strings (Aho and Corasick, 1975), shared by all choices.

    A state is the longest suffix of the text that begins some stop string, so its depth is how
    many characters must be held back.
    """

    __slots__ = ("_first", "depths", "fallbacks", "matches", "transitions")

    def __init__(self, stops: Sequence[str]) -> None:
        self.transitions: list[dict[str, int]] = [{}]
        self.fallbacks = [0]
        self.depths = [0]
        self.matches = [""]
        """Per state, the longest stop string that ends there; empty where none does."""
        for stop in stops:
            self._insert(stop)
        self._link()
        self._first = frozenset(self.transitions[0])

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.transitions[state].get(char)
            if following is None:
                following = len(self.transitions)
                self.transitions[state][char] = following
                self.transitions.append({})
                self.fallbacks.append(0)
                self.depths.append(self.depths[state] + 1)
                self.matches.append("")
            state = following
        self.matches[state] = stop

    def _link(self) -> None:
        queue = deque(self.transitions[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.transitions[state].items():
                self.fallbacks[following] = self.advance(self.fallbacks[state], char)
                queue.append(following)
            if not self.matches[state]:
                self.matches[state] = self.matches[self.fallbacks[state]]

    def advance(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            following = self.transitions[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fallbacks[state]

    def can_begin_in(self, text: str) -> bool:
        """Whether any stop string could begin within ``text``."""
        return not self._first.isdisjoint(text)


async def stop_strings(stops: Sequence[str]) -> StopStrings | None:
    """The automaton of a request's stop strings; None without any. Many characters are linked in a
    thread: a microsecond each."""
    if not stops:
        return None
    if sum(map(len, stops)) <= _INLINE_CHARS:
        return StopStrings(stops)
    return await asyncio.to_thread(StopStrings, stops)


@dataclass(slots=True)
class StopMatcher:
    """Follows one choice's text; the first stop string to end wins, the longest among equals.

    The result doesn't depend on how the text is cut into pieces.
    """

    strings: StopStrings
    include_stop: bool = False
    """Whether a matched stop string stays in the text; then nothing needs to be held back."""
    matched: str = ""
    """The stop string found, empty before."""
    _state: int = 0
    _held: str = ""

    def push(self, text: str) -> str:
        """What may be shown after ``text`` arrived. Nothing follows once ``matched`` is set."""
        strings = self.strings
        if not self._state and not strings.can_begin_in(text):
            return text
        pending = self._held + text
        state = self._state
        for end, char in enumerate(text, start=len(self._held) + 1):
            state = strings.advance(state, char)
            match = strings.matches[state]
            if match:
                self.matched, self._held, self._state = match, "", 0
                return pending[: end if self.include_stop else end - len(match)]
        self._state = state
        if self.include_stop:
            return text
        shown = len(pending) - strings.depths[state]
        self._held = pending[shown:]
        return pending[:shown]

    def flush(self) -> str:
        """What was held back, when the text ended without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
