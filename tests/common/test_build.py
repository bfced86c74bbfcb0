"""What the compiled objects must not do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lmi_core import _native

ROOT = Path(__file__).parents[2]
OBJECTS = ROOT / "build/native/CMakeFiles/lmi_native.dir/csrc/cpu/isa"
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


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs cmake")
def test_make_run_builds_what_this_processor_would_choose(tmp_path: Path) -> None:
    configure = ["cmake", f"-S{ROOT}", f"-B{tmp_path}", "-DLMI_PYTHON=OFF", "-DLMI_LEVELS=own"]
    done = subprocess.run(configure, capture_output=True, text=True, check=True)
    (line,) = (each for each in done.stdout.splitlines() if "Kernels: " in each)
    best = _native.instruction_sets()[-1]
    assert line.split(": ")[1].split(";") == list(dict.fromkeys(["scalar", best]))


def test_a_wheel_has_every_package() -> None:
    """What setup.py lists is what an installation without the source tree has."""
    code = (
        "import json, runpy, setuptools\n"
        "setuptools.setup = lambda **given: print(json.dumps(given['packages']))\n"
        "runpy.run_path('setup.py')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = {"lmi_core": "lmi_core", "server": "lmi_server"}
    there = {
        ".".join([name, *path.relative_to(ROOT / folder).parent.parts])
        for folder, name in names.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(json.loads(done.stdout)) == there
