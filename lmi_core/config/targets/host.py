"""What this machine offers a backend: devices and installed packages, found without imports."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lmi_core.config.table.capabilities import BACKENDS
from lmi_core.config.targets.gpus import gpu_memory_bytes, torch_objection, visible_gpus
from lmi_core.settings.job import Job, job_of

_CORES_PER_NEURON_DEVICE = 2


@dataclass(frozen=True, slots=True)
class Host:
    """Visible devices and the engine packages that are installed; a size that isn't known is 0."""

    num_gpus: int = 0
    num_neuron_cores: int = 0
    packages: frozenset[str] = frozenset()
    gpu_names: tuple[str, ...] = ()
    """As CUDA_VISIBLE_DEVICES names them; empty: by their numbers."""
    torch_objection: str = ""
    """Why the environment's torch can't use the GPUs; empty: it can, as far as is known."""
    gpu_memory_bytes: int = 0
    """Of the smallest GPU."""
    num_cores: int = 0
    """Physical ones within affinity and quota."""
    memory_bytes: int = 0
    """Main memory that this process may use."""
    job: Job | None = None
    """Of which this process is one."""

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
    gpus = visible_gpus(environ, dev)
    num_cores, memory_bytes = _sizes()
    return Host(
        num_gpus=len(gpus),
        num_neuron_cores=_num_neuron_cores(environ, dev),
        packages=found,
        gpu_names=gpus,
        torch_objection=torch_objection() if gpus else "",
        gpu_memory_bytes=gpu_memory_bytes() if gpus else 0,
        num_cores=num_cores,
        memory_bytes=memory_bytes,
        job=job_of(environ),
    )


def _sizes() -> tuple[int, int]:
    """Cores and memory."""
    try:
        from lmi_core import _native
    except ImportError:
        return 0, 0  # what needs the extension says so
    return _native.num_physical_cores(), int(_native.cpu_info()["memory_limit_bytes"])


def _num_neuron_cores(environ: Mapping[str, str], dev: Path) -> int:
    present = sum(1 for entry in dev.glob("neuron*") if re.fullmatch(r"neuron\d+", entry.name))
    cores = environ.get("NEURON_RT_NUM_CORES", "")
    if present and re.fullmatch("[0-9]{1,6}", cores):
        return int(cores)
    return present * _CORES_PER_NEURON_DEVICE
