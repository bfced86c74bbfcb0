"""What this machine offers a backend: devices and installed packages, found without imports."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lmi_core.config.table.capabilities import BACKENDS

_CORES_PER_NEURON_DEVICE = 2


@dataclass(frozen=True, slots=True)
class Host:
    """Visible devices and the engine packages that are installed."""

    num_gpus: int = 0
    num_neuron_cores: int = 0
    packages: frozenset[str] = frozenset()

    @property
    def num_devices(self) -> int:
        """Devices that tensor parallelism counts; 0 where there is only the CPU."""
        return self.num_gpus or self.num_neuron_cores

    @property
    def is_neuron(self) -> bool:
        """Whether the devices are Neuron's."""
        return self.num_gpus == 0 and self.num_neuron_cores > 0


def detect_host(environ: Mapping[str, str], dev: Path = Path("/dev")) -> Host:
    """Look at device files, visibility variables and installed packages."""
    wanted = {backend.package for backend in BACKENDS.values() if backend.package}
    found = frozenset(name for name in wanted if importlib.util.find_spec(name) is not None)
    return Host(_num_gpus(environ, dev), _num_neuron_cores(environ, dev), found)


def _num_gpus(environ: Mapping[str, str], dev: Path) -> int:
    present = sum(1 for entry in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        visible = environ.get("NVIDIA_VISIBLE_DEVICES", "all")
    if visible == "all":
        return present
    if visible in ("", "void", "none", "-1", "NoDevFiles"):
        return 0
    return min(present, len(visible.split(",")))


def _num_neuron_cores(environ: Mapping[str, str], dev: Path) -> int:
    present = sum(1 for entry in dev.glob("neuron*") if re.fullmatch(r"neuron\d+", entry.name))
    cores = environ.get("NEURON_RT_NUM_CORES", "")
    if present and re.fullmatch("[0-9]{1,6}", cores):
        return int(cores)
    return present * _CORES_PER_NEURON_DEVICE
