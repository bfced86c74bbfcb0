"""The guides name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("bench", "csrc", "examples", "lmi_core", "server", "tests")
DOCUMENTS = (
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "README.md",
    *sorted(
        str(path.relative_to(ROOT))
        for source in ("bench", "csrc", "lmi_core", "server")
        for path in (ROOT / source).rglob("README.md")
        if path.parent.name != "custom_code"  # names of files that users write
    ),
)
NAME = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|pyi|h|inc|cpp|cu|md)|(?:[\w.-]+/)+)`")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_named_exists(document: str) -> None:
    if not (ROOT / document).exists():
        pytest.skip(f"there is no {document}")
    paths = [path for source in SOURCES for path in (ROOT / source).rglob("*")]
    known = {f"/{path.relative_to(ROOT)}" + "/" * path.is_dir() for path in paths}
    known |= {f"/{path.name}" + "/" * path.is_dir() for path in ROOT.iterdir()}
    text = (ROOT / document).read_text(encoding="utf-8")
    names = NAME.findall(text)
    missing = [name for name in names if not any(path.endswith(f"/{name}") for path in known)]
    assert not missing
