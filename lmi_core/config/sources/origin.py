"""Where a setting was written, and how strong that place is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

PROPERTIES = "serving.properties"
"""The file of options in a model's directory."""


class Precedence(IntEnum):
    """Precedence of sources, weakest first (DJL-Serving's ModelInfo.java)."""

    DEFAULT = 0
    SERVER_FILE = 1
    SERVER_FLAG = 2
    TGI_VARIABLE = 3
    ALIAS_VARIABLE = 4
    VARIABLE = 5
    FILE = 6
    ENDPOINT = 7
    FLAG = 8
    OVERRIDE = 9


COMMAND_LINE = (Precedence.SERVER_FLAG, Precedence.FLAG, Precedence.OVERRIDE)
"""Of which the last one counts where a flag is repeated, as everywhere."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One key with the text written for it; ``where`` names file and line, variable or flag."""

    key: str
    text: str
    precedence: Precedence
    where: str

    @property
    def is_of_model(self) -> bool:
        """Whether a file in the model's own directory says so, which may have come with it."""
        path = Path(self.where.rpartition(":")[0])
        return self.precedence is Precedence.FILE and path.name == PROPERTIES

    @property
    def shown(self) -> str:
        """The text, cut so that it fits into a message."""
        return self.text if len(self.text) <= 80 else self.text[:77] + "..."
