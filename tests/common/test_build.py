"""What the compiled objects must not do."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

OBJECTS = Path(__file__).parents[2] / "build/native/CMakeFiles/lmi_native.dir/csrc/cpu/isa"
NM = shutil.which("nm")


@pytest.mark.skipif(
    NM is None or not OBJECTS.exists(), reason="needs nm and a build in build/native"
)
def test_kernels_share_no_symbols_between_instruction_sets() -> None:
    """Of a weak symbol the linker keeps one copy, and a CPU without AVX-512 may get that one.

    Names in a level's own namespace can't meet those of another.
    """
    objects = sorted(OBJECTS.glob("*.o"))
    assert objects
    for path in objects:
        assert NM is not None
        output = subprocess.check_output([NM, "-C", "--defined-only", path], text=True)
        own_namespace = f"lmi::cpu::{path.name.removesuffix('.cpp.o')}::"
        weak = [line for line in output.splitlines() if line.split()[1] in "WVu"]
        shared = [line for line in weak if own_namespace not in line]
        assert shared == [], f"{path.name} shares {shared}"
