"""Texts that are encoded as a whole: what is put around them, and what goes where they are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Truncate = Literal["", "left", "right"]


@dataclass(frozen=True, slots=True)
class FramedText:
    """A text, or a pair that the tokenizer joins, and what is put around it instead of the special
    tokens that it adds itself."""

    text: str
    pair: str | None = None
    frame: tuple[str, str] | None = None


class WholeText(NamedTuple):
    """Token ids, and how many come before those of the second text of a pair; -1: there is none, or
    the tokenizer doesn't tell them apart."""

    ids: list[int]
    num_first: int = -1


def kept_places(texts: Sequence[int | None], num_over: int, truncate: Truncate) -> Sequence[int]:
    """Places of the tokens that stay when ``num_over`` go, of the longer text first; ``texts``: by
    token, the number of its text, None: it was added."""
    places = [[i for i, text in enumerate(texts) if text == number] for number in (0, 1)]
    lengths = [len(own) for own in places]
    for _ in range(min(num_over, sum(lengths))):
        lengths[lengths[1] > lengths[0]] -= 1
    kept = {i for i, text in enumerate(texts) if text is None}
    for own, length in zip(places, lengths, strict=True):
        kept.update(own[:length] if truncate == "right" else own[len(own) - length :])
    return sorted(kept)
