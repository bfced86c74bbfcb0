"""A process' place among those that mpirun, srun or torchrun have started together.

Sources: Open MPI, "Environmental variables"; MPICH's and Intel MPI's Hydra (PMI); Slurm, srun,
"OUTPUT ENVIRONMENT VARIABLES"; PyTorch, "torchrun (Elastic Launch)", environment variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lmi_core.errors import UserError

_MOST = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Several processes of one program, each of which knows which it is."""

    started_by: str
    rank: int
    size: int
    is_spread: bool = False
    """Whether some of them are on other machines."""
    name: str = ""
    """What tells it from other jobs of this machine, the same in all of its processes here."""
    said_by: str = ""
    """The variable that has the size."""

    @property
    def objection(self) -> str:
        """Why its processes can't be a model's ranks, and what can; empty: they can."""
        if not self.is_spread:
            return ""
        return (
            f"{self.started_by} has started {self.size} processes on several machines, and the lmi "
            "engine's ranks share memory, so that they have to be on one: start a server on each "
            f"machine{self.way_out}, or one by itself with option.on=ray, which places copies on "
            "all of them; a model that no machine can hold is for option.rolling_batch=vllm"
        )

    @property
    def way_out(self) -> str:
        """How to serve without it, as the end of an advice."""
        return f" (env -u {self.said_by} lmi serve takes a process for itself)"


class _Variables(NamedTuple):
    started_by: str
    size: str
    rank: str
    also: str
    """Which whoever else sets the first two doesn't; empty: nobody else does."""
    num_here: str
    """Processes on this machine."""
    num_machines: str
    name: tuple[str, ...]
    """Together they name the job; without them, who has started the process does."""


_KNOWN = (
    _Variables(
        started_by="torchrun",
        size="WORLD_SIZE",
        rank="RANK",
        also="TORCHELASTIC_RUN_ID",  # scripts and trainers set RANK and LOCAL_RANK, too
        num_here="LOCAL_WORLD_SIZE",
        num_machines="",
        name=("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    ),
    _Variables(
        started_by="mpirun",
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        also="",
        num_here="OMPI_COMM_WORLD_LOCAL_SIZE",
        num_machines="",
        name=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Variables(
        started_by="mpirun",
        size="PMI_SIZE",
        rank="PMI_RANK",
        also="MPI_LOCALNRANKS",  # Hydra's, which may have started its own part by srun
        num_here="MPI_LOCALNRANKS",
        num_machines="",
        name=(),
    ),
    _Variables(
        started_by="srun",
        size="SLURM_STEP_NUM_TASKS",  # a batch script has SLURM_NTASKS, too, and is one process
        rank="SLURM_PROCID",
        also="SLURM_STEP_ID",
        num_here="",
        num_machines="SLURM_STEP_NUM_NODES",
        name=("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    _Variables(
        started_by="mpirun",
        size="PMI_SIZE",
        rank="PMI_RANK",
        also="",
        num_here="PMI_LOCAL_SIZE",
        num_machines="",
        name=(),
    ),
)
"""The innermost first: torchrun and mpirun start processes within srun's."""


def job_of(environ: Mapping[str, str]) -> Job | None:
    """The job that this process belongs to; None: it is alone. Raises UserError for variables that
    say what can't be."""
    given = {name: text for name, text in environ.items() if text.strip()}
    for known in _KNOWN:
        if all(name in given for name in (known.size, known.rank, known.also) if name):
            size = _number(given, known.size, 1, _MOST)
            num_machines = _number(given, known.num_machines, 1, _MOST, otherwise=1)
            if size == num_machines:  # a process alone, or a server on each machine
                return None
            rank = _number(given, known.rank, 0, size - 1)
            num_here = _number(given, known.num_here, 1, size, otherwise=size)
            return Job(
                started_by=known.started_by,
                rank=rank,
                size=size,
                is_spread=num_machines > 1 or num_here < size,
                name=_name(given, known),
                said_by=known.size,
            )
    return None


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """For a process of one's own, which is none of the job's."""
    sizes = {known.size for known in _KNOWN}
    return {name: text for name, text in environ.items() if name not in sizes}


def _name(environ: Mapping[str, str], known: _Variables) -> str:
    found = [f"{name}={environ[name]}" for name in known.name if name in environ]
    return " ".join(found or [f"{known.started_by} {os.getppid()}"])


def _number(
    environ: Mapping[str, str], name: str, low: int, high: int, otherwise: int | None = None
) -> int:
    """``otherwise``: where the variable isn't set."""
    if otherwise is not None and name not in environ:
        return otherwise
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high):
        raise UserError(
            f"{name}={text[:40]!r} is not a number from {low} to {high}: mpirun, srun and torchrun "
            "set it; unset it where none of them starts lmi",
            field=name,
        )
    return int(text)
