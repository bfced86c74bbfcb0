"""Which library compiles grammars: llguidance, an optional dependency."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Sequence

from lmi_core.errors import MissingExtraError, UserError
from lmi_core.structured.grammar import Grammar
from lmi_core.structured.matcher import GrammarLibrary
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.version import llguidance_too_old

EXTRA = "structured"


def is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


def _version() -> str:
    """Empty where its metadata is missing."""
    try:
        return importlib.metadata.version("llguidance")
    except importlib.metadata.PackageNotFoundError:
        return ""


def load_library(
    tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarLibrary:
    """The library with a model's vocabulary; takes a while for a large one.

    Raises MissingExtraError when it isn't installed, UserError where it is too old, and for a model
    that no text of a grammar could end with, or whose tokens don't have a text each.
    """
    if not is_installed():
        raise MissingExtraError("structured output", EXTRA)
    if objection := llguidance_too_old(_version()):
        raise UserError(f"structured output: {objection}", field="grammar")
    if not eos_token_ids:
        raise UserError(
            "structured output needs a model with an end-of-sequence id; name it in "
            "generation_config.json (eos_token_id)",
            field="grammar",
        )
    if tokenizer.token_bytes is None:
        raise UserError(
            "structured output needs a tokenizer whose tokens stand for bytes (byte-level BPE or "
            "byte fallback); this model's is of another kind",
            field="grammar",
        )
    from lmi_core.structured.guidance import GuidanceLibrary

    return GuidanceLibrary(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)


def try_in_child(grammar: Grammar) -> None:
    """Compile a grammar to see whether it can be. Raises UserError as the library does."""
    from lmi_core.structured.guidance import try_grammar

    try_grammar(grammar)
