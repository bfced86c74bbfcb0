"""The interface of a library that keeps text to a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lmi_core.structured.grammar import Grammar

Mask = npt.NDArray[np.uint32]
"""A bit per token id, lowest first; set: the token may come next."""


class Matcher(Protocol):
    """Where one choice is in its grammar."""

    def fill_mask(self, mask: Mask) -> None:
        """Write the tokens that may come next; the end-of-sequence ids alone when the text is
        complete and can't go on. UserError when the grammar costs too much."""
        ...

    def accept(self, token_id: int) -> None:
        """Go on by a token. UserError when the grammar doesn't allow it or costs too much."""
        ...

    def forced_tokens(self, behind: Sequence[int] = ()) -> list[int]:
        """Tokens that spell what the grammar leaves no choice about, behind tokens that may come,
        as far as that is known in a moment; others may spell it, too."""
        ...

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these tokens, from the first one on, may come next; fewer where finding out
        has taken long."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the text matches and nothing can be added to it."""
        ...

    @property
    def is_spent(self) -> bool:
        """Whether everything may come from here on, so that it needn't be asked any more."""
        ...


class CompiledGrammar(Protocol):
    """A grammar for one tokenizer; any number of matchers share it."""

    def matcher(self) -> Matcher: ...


class GrammarLibrary(Protocol):
    """Compiles grammars for one tokenizer; called from several threads."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises UserError with the reason for a grammar that is wrong or too large."""
        ...
