"""The NVIDIA GPUs that this process sees and whether torch can use them, without importing it.

Sources: CUDA C++ Programming Guide, environment variables; the references of the CUDA driver's API
and of NVML.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from lmi_core.version import torch_too_old

_NONE = ("", "void", "none", "-1", "NoDevFiles")


def visible_gpus(environ: Mapping[str, str], dev: Path) -> tuple[str, ...]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them."""
    present = sum(1 for entry in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name))
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        container = environ.get("NVIDIA_VISIBLE_DEVICES", "all")
        count = 0 if container in _NONE else len(container.split(","))
        return tuple(map(str, range(present if container == "all" else min(present, count))))
    found: list[str] = []
    for name in given.split(","):
        name = name.strip()
        if name in found or not _exists(name, present):
            break  # what follows the first that isn't there doesn't count
        found.append(name)
    return tuple(found[:present])


def _exists(name: str, present: int) -> bool:
    return name.startswith(("GPU-", "MIG-")) or (
        name.isascii() and name.isdigit() and int(name) < present
    )


def torch_objection() -> str:
    """Why the environment's torch can't use a GPU that is there; empty if nothing is known."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed here: pip install 'lmi-core[cuda]'"
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return ""
    facts = dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= (?:'([^'\n]*)'|None)", text, re.M))
    version, cuda = facts.get("__version__", "?"), facts.get("cuda")
    if cuda == "":
        return f"torch {version} here is built without CUDA: install a build with it"
    if objection := torch_too_old(version):
        return objection
    if cuda is None or not cuda.partition(".")[0].isdigit():
        return ""
    driver = driver_version()
    if driver is None:
        return "the driver's libcuda.so.1 can't be loaded: look at nvidia-smi"
    if driver[0] < int(cuda.partition(".")[0]):
        newest = ".".join(map(str, driver))
        return (
            f"torch {version} here is built for CUDA {cuda}, and the driver knows CUDA {newest} at "
            "most: install a torch built for that, or a newer driver"
        )
    return ""


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA of the driver, which isn't started; None: there is none."""
    version = ctypes.c_int()
    try:
        error = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if error else (version.value // 1000, version.value % 1000 // 10)


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def gpu_memory_bytes() -> int:
    """Memory of the smallest GPU of the machine; 0 if NVML doesn't say."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return 0
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        totals = [_total(nvml, i) for i in range(count.value)]
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return 0
    return min(totals, default=0)


def _total(nvml: ctypes.CDLL, index: int) -> int:
    device, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
        return 0
    failed = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    return 0 if failed else int(memory.total)
