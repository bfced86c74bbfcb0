"""One request with its right answer, and how to tell a right answer from a wrong one."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, a model answer, and what any acceptable answer must satisfy.

    `required` words must all occur, `forbidden` ones must not; with `keys` the answer must be a
    JSON object with exactly these keys.
    """

    kind: str
    prompt: str
    answer: str
    required: tuple[str, ...] = ()
    forbidden: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def accepts(self, answer: str) -> bool:
        """Whether `answer` fulfils the task."""
        if self.keys and not _has_keys(answer, self.keys):
            return False
        has_required = all(contains(answer, word) for word in self.required)
        return has_required and not any(contains(answer, word) for word in self.forbidden)


def contains(text: str, phrase: str) -> bool:
    """Whether `phrase` occurs in `text` as whole words, letter case aside."""
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


def _has_keys(answer: str, keys: tuple[str, ...]) -> bool:
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return isinstance(value, dict) and set(value) == set(keys)
