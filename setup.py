"""Package layout and the native build: CMake makes ``lmi_core._native``."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def find_program(name: str) -> str | None:
    """A program next to this interpreter (a virtual environment's), else from PATH."""
    beside = str(Path(sys.executable).parent)
    return shutil.which(name, path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def check_toolchain() -> None:
    """Stop with one clear line when something that the build needs is missing."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    if shutil.which(compiler) is None:
        sys.exit(f"error: the C++ compiler '{compiler}' was not found: apt install g++")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        sys.exit("error: Python.h was not found: apt install python3-dev")
    if find_program("cmake") is None:
        sys.exit("error: cmake was not found: pip install cmake (or apt install cmake)")


class CMakeBuild(build_ext):
    """Builds the extension with CMake, incrementally."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        check_toolchain()
        cmake = find_program("cmake")
        assert cmake is not None
        build_dir = ROOT / "build" / "native"
        build_dir.mkdir(parents=True, exist_ok=True)
        configure = [
            cmake,
            f"-S{ROOT}",
            f"-B{build_dir}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            "-DLMI_LEVELS=all",
            *os.environ.get("CMAKE_ARGS", "").split(),
        ]
        subprocess.check_call(configure + self._generator(build_dir))
        num_jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", len(os.sched_getaffinity(0)))
        subprocess.check_call(
            [cmake, "--build", str(build_dir), "--target", "_native", "-j", str(num_jobs)]
        )
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(build_dir / target.name, target)

    @staticmethod
    def _generator(build_dir: Path) -> list[str]:
        """Ninja when present. A build directory keeps its generator, unless its program is gone."""
        cache = build_dir / "CMakeCache.txt"
        ninja = find_program("ninja")
        has_ninja_cache = cache.exists() and "CMAKE_GENERATOR:INTERNAL=Ninja" in cache.read_text()
        if cache.exists() and has_ninja_cache != (ninja is not None):
            shutil.rmtree(build_dir)
        if ninja is None:
            return []
        return ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]


setup(
    version=runpy.run_path("lmi_core/version.py")["__version__"],
    packages=[
        *find_packages(include=["lmi_core*"]),
        "lmi_server",
        *(f"lmi_server.{name}" for name in find_packages("server")),
    ],
    package_dir={"lmi_server": "server"},
    # Only those named, or setuptools asks for a package of each of their folders.
    include_package_data=False,
    package_data={
        "lmi_core": ["py.typed", "*.pyi", "demo/*.md", "demo/model/*"],
        "lmi_server": ["py.typed"],
        "lmi_server.http": ["ui.html", "docs.html"],
    },
    ext_modules=[Extension("lmi_core._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
