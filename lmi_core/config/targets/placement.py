"""How many devices share a copy of the model and how many copies that makes.

Source: LMI format reference, number of workers and devices; TGI format reference, launcher.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.config.targets.engine_settings import runs_in_engine
from lmi_core.config.targets.host import Host


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices per copy and copies; one copy on the CPU is (1, 1)."""

    tensor_parallel_degree: int = 1
    num_copies: int = 1


def placement_for(
    backend: str,
    values: Values,
    host: Host,
    system: str,
    *,
    mpi_mode: bool,
    problems: Problems,
) -> Placement:
    """Return the placement on ``backend``; our engine runs one copy on one device."""
    if not runs_in_engine(backend):
        return place(values, host, system, mpi_mode=mpi_mode, problems=problems)
    device = values.get("option.device") or "cpu"
    who = "the lmi engine" if backend == "lmi" else "the model"
    if host.is_neuron:
        problems.warn(
            "",
            f"{host.num_neuron_cores} Neuron cores are visible, but {who} runs on the CPU; "
            "option.rolling_batch=vllm serves it there with vLLM's plugin",
        )
    if host.num_gpus and device == "cpu":
        problems.warn(
            "",
            f"{host.num_gpus} GPUs are visible, but {who} runs on the CPU; "
            "option.device=cuda uses the first of them",
        )
    if device == "cuda" and not host.num_gpus:
        key = "option.device"
        problems.warn(values.where(key), "option.device=cuda, but no GPU is visible here", key)
    return Placement()


def place(
    values: Values, host: Host, system: str, *, mpi_mode: bool, problems: Problems
) -> Placement:
    """Return the placement the reference would choose; too few devices are an error."""
    key = "option.tensor_parallel_degree"
    degree = values.get(key)
    devices = host.num_devices
    if devices == 0:
        return Placement()
    if degree is None:
        degree = "max" if system in ("tgi", "trtllm", "vllm", "lmi_dist", "common") else -1
        degree = 1 if system in ("deepspeed", "neuronx") else degree
    if degree == "max":
        return Placement(devices, 1)
    assert isinstance(degree, int)
    if degree <= 0:
        return Placement(devices, 1) if mpi_mode else Placement(1, devices)
    stages = values.get("option.pipeline_parallel_degree")
    needed = degree * (stages if isinstance(stages, int) else 1)
    if needed > devices:
        problems.error(
            values.where(key),
            f"{key}={degree} needs {needed} devices, but {devices} are visible: write max, or at "
            f"most {devices}",
            key,
        )
        return Placement(degree, 0)
    return Placement(degree, 1 if system == "tgi" else devices // needed)
