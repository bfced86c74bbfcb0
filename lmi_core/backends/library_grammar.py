"""A grammar as other libraries take it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar, GrammarKind


def grammar_arguments(
    grammar: Grammar, library: str, choice: Callable[[list[str]], dict[str, Any]]
) -> dict[str, Any]:
    """JSON schemas and regular expressions by the names that the libraries have for them, and what
    ``choice`` makes of texts to choose from; UserError for what a library reads otherwise."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"json": grammar.text}
        case GrammarKind.REGEX:
            return {"regex": grammar.text}
        case GrammarKind.CHOICE:
            return choice(json.loads(grammar.text))
    raise UserError(
        f"{grammar.field}: only JSON schemas, regular expressions and choices are passed on to "
        f"{library}",
        field=grammar.field,
    )
