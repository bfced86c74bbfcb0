"""What the engine is told about LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmi_core.errors import UserError
from lmi_core.settings.field_checks import check_fields, is_utf8

LARGEST_RANK = 1024


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters may be loaded; UserError for values that aren't allowed."""

    max_rank: int = 16
    """Adapters of a higher rank are refused."""
    adapters: tuple[tuple[str, Path], ...] = ()
    """Names and PEFT directories of those loaded at start."""

    default: str = ""
    """The adapter of requests that name none; "": they are the base model's."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.max_rank <= LARGEST_RANK:
            raise UserError(
                f"max_rank is {self.max_rank}; allowed are 1 to {LARGEST_RANK}", field="max_rank"
            )
        names = [name for name, _ in self.adapters]
        for name in names:
            check_adapter_name(name)
            if names.count(name) > 1:
                raise UserError(
                    f"{names.count(name)} adapters have the name {name!r}; give each its own",
                    field="adapters",
                )


def check_adapter_name(name: object) -> None:
    """Raise UserError for what can't be an adapter's name; "" stands for the base model."""
    if not isinstance(name, str) or not name:
        raise UserError(f"an adapter's name is a text, not {name!r:.80}", field="adapter")
    if not is_utf8(name):
        raise UserError(f"an adapter's name is valid UTF-8, not {name!r:.80}", field="adapter")
