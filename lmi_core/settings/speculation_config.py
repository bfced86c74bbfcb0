"""How tokens are drafted; what is generated doesn't depend on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_core.errors import UserError
from lmi_core.settings.field_checks import check_fields

MAX_DRAFT_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Drafts come from the request's own text, from texts that ended before, from what its
    grammar leaves no choice about, and from a draft model, if there is one. UserError for a field
    out of range."""

    max_draft_tokens: int = 16
    """Of a sequence in a step; fewer where so many don't pay."""
    min_match: int = 2
    """Tokens by which a place is found that a text may go on as."""
    max_match: int = 32
    """The last tokens by which several such places are compared."""

    draft_model: Path | None = None
    """Directory of a model with the same vocabulary, or of Medusa heads or an EAGLE head for the
    model, which draft where that pays (CPU engine)."""

    def __post_init__(self) -> None:
        if isinstance(self.draft_model, str):
            object.__setattr__(self, "draft_model", Path(self.draft_model))
        check_fields(self)
        for name, value, low, high in (
            ("max_draft_tokens", self.max_draft_tokens, 1, MAX_DRAFT_TOKENS),
            ("min_match", self.min_match, 1, 64),
            ("max_match", self.max_match, self.min_match, 1024),
        ):
            if not low <= value <= high:
                raise UserError(f"{name} is {value}; allowed are {low} to {high}", field=name)
