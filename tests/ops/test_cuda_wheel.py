"""The CUDA kernels' library as a wheel beside lmi-core's: built, installed, found and loaded."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from lmi_core import doctor
from lmi_core.errors import UserError
from lmi_core.ops.kernels import library_file
from lmi_core.version import __version__

EMULATOR = Path(__file__).parents[2] / "build/native/liblmi_cuda_emulator.so"

WHEELS = runpy.run_path(str(Path(__file__).parents[2] / "server/deploy/cuda_wheel.py"))


def test_a_tag_says_the_oldest_glibc() -> None:
    tag_of, end = WHEELS["tag_of"], os.uname().machine
    assert tag_of(b"GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.17") == f"py3-none-manylinux_2_34_{end}"
    assert tag_of(b"GLIBC_2.2.5\0GLIBC_2.4") == f"py3-none-manylinux_2_17_{end}"
    assert tag_of(b"GLIBC_2.34\0libstdc++.so.6") == f"py3-none-linux_{end}"


@pytest.mark.skipif(not EMULATOR.exists(), reason="the emulator is not built: make build")
def test_an_installed_wheel_is_found_and_loaded(tmp_path: Path) -> None:
    """By another process; the emulator takes the library's place."""
    wheel = WHEELS["build"](EMULATOR, tmp_path / "dist")
    assert wheel.name.startswith(f"lmi_cuda-{__version__}-py3-none-")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", str(site), str(wheel)], check=True)
    assert "lmi_cuda/liblmi_cuda.so," in next(site.glob("*.dist-info/RECORD")).read_text()
    code = "from lmi_core.ops.kernels.library_file import *\npath = find()\nprint(describe(path))"
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{os.getcwd()}"}
    environment.pop(library_file.VARIABLE, None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    expected = site / "lmi_cuda/liblmi_cuda.so"
    assert done.stdout == f"{expected}, version {library_file.VERSION} of the interface\n"


def test_without_it_the_wheel_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    from lmi_core.ops.kernels import select

    monkeypatch.setattr(library_file, "find", lambda: None)
    monkeypatch.delenv(library_file.VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"pip install lmi-cuda=={__version__}, or build it"):
        select.select("cuda", "native")
    assert "the wheel lmi-cuda is not installed" in doctor._cuda_kernels().text
    assert library_file.unfit(tmp_path, library_file.VERSION) == ""
    assert f"pip install lmi-cuda=={__version__}" in library_file.unfit(tmp_path, 1)


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "liblmi_cuda.so").write_text("no")
    assert "can't be loaded" in library_file.describe(tmp_path / "liblmi_cuda.so")
