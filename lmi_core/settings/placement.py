"""Which devices a model's copies run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmi_core.settings.job import Job
from lmi_core.units import megabytes

DeviceKind = Literal["cpu", "torch-cpu", "cuda", "neuron"]
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "neuron": "NEURON_RT_VISIBLE_CORES"}
"""The variable that says which devices a process sees."""
MAX_WORKERS = 1000
"""Most processes that serve one model, whoever asks for them."""
DEVICE_NAMES = {"cuda": "GPU", "neuron": "Neuron core"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The decision of one model's configuration on one machine: kind of device, degrees, copies.

    ``device_ids`` are the devices of each copy, as the variable of ``VISIBLE`` names them; there
    are none on the CPU. A size that isn't known is 0.
    """

    device: DeviceKind = "cpu"
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    num_copies: int = 1
    most_copies: int = 1
    """By load; at least ``num_copies``."""
    device_ids: tuple[tuple[str, ...], ...] = ()
    num_cores: int = 0
    """Physical cores of each copy, or of each of its processes on the CPU; threads where the
    configuration says how many."""
    memory_bytes: int = 0
    """Of each device; on the CPU of the machine, as far as this process may use it."""
    job: Job | None = None
    """Whose processes the ranks run in; None: they are started."""
    on: Literal["here", "ray"] = "here"
    """The machines: this one, or the nodes of a Ray cluster, whose sizes aren't known here."""

    @property
    def num_devices(self) -> int:
        """Devices of each copy; on the CPU processes."""
        return self.tensor_parallel_degree * self.pipeline_parallel_degree

    @property
    def has_ranks(self) -> bool:
        """Whether each copy is shared: by processes of our engine, or by another library."""
        return self.tensor_parallel_degree > 1

    def environment(self, copy_id: int) -> dict[str, str]:
        """What the process of a copy has in its environment to see its own devices alone."""
        if not self.device_ids:
            return {}
        return {VISIBLE[self.device]: ",".join(self.device_ids[copy_id])}

    def describe(self) -> str:
        """Say it with numbers, for people."""
        more = f" to {self.most_copies}" if self.most_copies > self.num_copies else ""
        copies = f"{self.num_copies}{more} copies, " if self.num_copies > 1 or more else ""
        each = " each" if copies else ""
        memory = f", {megabytes(self.memory_bytes)} of memory" if self.memory_bytes else ""
        cores = f", {_count(self.num_cores, 'core')}{each}" if self.num_cores else ""
        if self.on == "ray" and self.device == "cuda":
            shape = self._shape().removesuffix(": ")
            shape = f" ({shape})" if shape else ""
            gpus = f"{_count(self.num_devices, 'GPU')}{each}"
            return f"{copies}{gpus}{shape} of a Ray cluster's nodes{cores}"
        if self.device in DEVICE_NAMES and not self.device_ids:
            return f"{_count(self.num_devices, DEVICE_NAMES[self.device])}, which can't be had"
        if not self.device_ids:
            torch = " by torch" if self.device == "torch-cpu" else ""
            cpu = "the CPU" if self.on == "here" else "the CPU of a Ray cluster's nodes"
            if self.tensor_parallel_degree > 1:
                cores = f", {_count(self.num_cores, 'core')} each" if self.num_cores else ""
                whose = "" if self.job is None else f" in {self.job.started_by}'s processes"
                ranks = f"{self.tensor_parallel_degree} ranks{whose}"
                return f"{copies}{cpu}{torch} by {ranks}{' each' * bool(copies)}{cores}{memory}"
            return f"{copies}{cpu}{torch}{cores}{memory}"
        name = DEVICE_NAMES[self.device]
        ids = "; ".join(", ".join(one) for one in self.device_ids)
        memory = f", {megabytes(self.memory_bytes)} per {name}" if self.memory_bytes else ""
        shape = self._shape()
        return f"{copies}{_count(self.num_devices, name)}{each} ({shape}{ids}){memory}{cores}"

    def _shape(self) -> str:
        parts = []
        if self.tensor_parallel_degree > 1:
            parts.append(f"tensor parallel degree {self.tensor_parallel_degree}")
        if self.pipeline_parallel_degree > 1:
            parts.append(f"{self.pipeline_parallel_degree} pipeline stages")
        return f"{', '.join(parts)}: " if parts else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
