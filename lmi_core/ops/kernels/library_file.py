"""Where the CUDA kernels' library lies; found, and asked for its version, without torch.

In the order in which they count: the file that ``LMI_CUDA_LIBRARY`` names, one that was built into
this package (``make cuda-all``), the one of the wheel ``lmi-cuda``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

from lmi_core.version import __version__

VARIABLE = "LMI_CUDA_LIBRARY"
VERSION = 21
"""LMI_CUDA_VERSION of csrc/cuda/lmi_cuda.h that this package was written for."""
NAME = "liblmi_cuda.so"
WHEEL = "lmi-cuda"


def find() -> Path | None:
    """The library's file, if there is one."""
    named = os.environ.get(VARIABLE, "")
    candidates = [Path(named)] if named else [Path(__file__).parents[2] / NAME, *_of_wheel()]
    return next((path for path in candidates if path.is_file()), None)


def missing() -> str:
    """What to do where ``find`` finds none."""
    named = os.environ.get(VARIABLE, "")
    if named:
        return f"{VARIABLE}={named} is no file: unset it, or name a {NAME}"
    return (
        f"the wheel {WHEEL} is not installed: pip install {WHEEL}=={__version__}, or build it "
        "where there is nvcc: make cuda-wheel"
    )


def unfit(path: Path, version: int) -> str:
    """Why a library of that interface's version can't be used; empty if it can."""
    if version == VERSION:
        return ""
    return (
        f"{path} has version {version} of the kernels' interface, wanted is {VERSION}: "
        f"pip install {WHEEL}=={__version__}, or build it again: make cuda-all"
    )


def describe(path: Path) -> str:
    """A line about the file, which is loaded: a GPU isn't asked for yet."""
    try:
        version = int(ctypes.CDLL(str(path)).lmi_cuda_version())
    except (OSError, AttributeError) as error:
        return f"{path} can't be loaded: {error}"
    return unfit(path, version) or f"{path}, version {version} of the interface"


def _of_wheel() -> list[Path]:
    spec = importlib.util.find_spec("lmi_cuda")
    return [Path(place, NAME) for place in (spec and spec.submodule_search_locations) or ()]
