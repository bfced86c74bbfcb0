"""tests/machine_code/waits.py finds what a kernel does before it waits for earlier ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
GOOD = [
    "S2R R0, SR_TID.X",
    "CCTL.E.PF2 [R6]",
    "ACQBULK",
    "PREEXIT",
    "@!P0 LDG.E R2, desc[UR4][R4.64]",
    "EXIT",
]


@pytest.fixture
def waits(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import waits

    yield waits
    for name in ("waits", "loops"):
        sys.modules.pop(name, None)


def moved(first: int, to: int) -> list[str]:
    lines = GOOD.copy()
    lines.insert(to, lines.pop(first))
    return lines


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (GOOD, ""),
        (moved(4, 0), "touches memory before it waits: @!P0 LDG.E R2, desc[UR4][R4.64]"),
        (moved(5, 2), "can end before it waits"),
        (moved(3, 2), "lets the next kernel start before it waits"),
        (GOOD[:2] + GOOD[3:], "has 0 waits and 1 triggers, not one of each"),
        ([*GOOD, "ACQBULK"], "has 2 waits and 1 triggers, not one of each"),
    ],
)
def test_faults_are_found(waits, lines: list[str], fault: str) -> None:
    kernel = [waits.Instruction(16 * i, line, 0) for i, line in enumerate(lines)]
    assert waits.fault_of(kernel) == fault


def test_what_is_no_build_is_refused(waits, monkeypatch, tmp_path: Path) -> None:
    """A folder without a kernel is no proof."""
    monkeypatch.setattr(sys, "argv", ["waits.py", str(tmp_path)])
    assert waits.main() == 1
    monkeypatch.setattr(sys, "argv", ["waits.py"])
    assert waits.main() == 2
