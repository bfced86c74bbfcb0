"""How GGUF files are named."""

from __future__ import annotations

import re
from pathlib import Path

PATTERN = "*.[gG][gG][uU][fF]"
"""As shells match names."""
SPLIT_NAME = re.compile(r"(.*-)(\d{5})(-of-(\d{5})\.gguf)", re.IGNORECASE)
"""Of a part: what comes before its number, the number, the rest, and how many parts there are."""


def is_later_part(path: Path) -> bool:
    """Whether ``path`` is named as a part of a model that isn't the first."""
    match = SPLIT_NAME.fullmatch(path.name)
    return match is not None and int(match[2]) != 1
