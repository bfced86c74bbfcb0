"""How a model is placed on the CPU: processes that share it, copies, cores.

Source: DJL-Serving's ModelInfo.java, number of workers.
"""

from __future__ import annotations

from lmi_core.config.targets.host import Host
from lmi_core.config.targets.placed_subject import (
    COPIES,
    DEGREE,
    ON,
    OWN,
    OWN_COPIES,
    STAGES,
    Subject,
)
from lmi_core.runners.cpu.core_groups import most_ranked_copies
from lmi_core.settings.placement import DeviceKind, Placement

BINDING = "option.cpu_binding"
_WORKERS = {"cpu": ("cpu.minWorkers", "minWorkers"), "gpu": ("gpu.minWorkers", "minWorkers")}
_MOST = {"cpu": ("cpu.maxWorkers", "maxWorkers"), "gpu": ("gpu.maxWorkers", "maxWorkers")}
"""Keys of copies on each kind of device, the strongest first."""
WORKER_KEYS = {key for keys in (*_WORKERS.values(), *_MOST.values()) for key in keys}
COPY_KEYS = (OWN_COPIES, *_WORKERS["cpu"])
_UNUSED = {
    DEGREE: "on the CPU one process uses all cores",
    STAGES: "on the CPU a copy has no stages",
    COPIES: "it counts copies on GPUs, option.num_copies those on the CPU",
}
_ONE_ENGINE = "one engine serves the model; it takes as many requests as its batch holds"


def on_cpu(subject: Subject, kind: DeviceKind) -> Placement:
    """Decide it for the CPU engine, or for torch on the CPU."""
    values, on_ray = subject.values, subject.values.get(ON) == "ray"
    host = Host() if on_ray else subject.host
    degree = _degree_on_cpu(subject, kind)
    if subject.backend in OWN:
        for key, why in _UNUSED.items():
            if key in values.known and (key != DEGREE or degree == 1):
                values.ignored[key] = why
    if on_ray:
        _check_binding(subject, degree)
    threads = values.get("option.num_threads")
    num_copies = copies_of(subject, kind)
    most_copies = most_copies_of(subject, kind, num_copies)
    num_ranks = num_copies * degree
    if degree > 1 and host.job is None and host.num_cores:
        most_copies = _most_by_cores(subject, host.num_cores, degree, num_copies, most_copies)
    if degree > 1 and host.job is None and 0 < host.num_cores < num_ranks:
        copies = f" in {num_copies} copies" if num_copies > 1 else ""
        most = host.num_cores // num_copies
        fitting = f"{DEGREE}={1 << most.bit_length() - 1}, or " if most > 1 else ""
        subject.refuse(
            DEGREE,
            f"{DEGREE}={degree}{copies} needs {num_ranks} cores, one for each process, and there "
            f"are {host.num_cores} here: write {fitting}{DEGREE}=1, with which one process uses "
            f"all cores{', or fewer copies' if num_copies > 1 else ''}",
        )
    num_cores = max(1, host.num_cores // num_ranks) if host.num_cores else 0
    if host.job is not None:  # each of its processes has those that it was given
        num_cores = 0
    return Placement(
        device=kind,
        tensor_parallel_degree=degree,
        num_copies=num_copies,
        most_copies=most_copies,
        num_cores=threads if kind == "cpu" and isinstance(threads, int) else num_cores,
        memory_bytes=host.memory_bytes,
        job=host.job if degree > 1 and kind == "cpu" else None,
        on="ray" if on_ray else "here",
    )


def _check_binding(subject: Subject, degree: int) -> None:
    """What a copy is bound to on a node that may have others."""
    values = subject.values
    if values.get(BINDING) == "cores":
        subject.refuse(
            BINDING,
            f"{BINDING}=cores doesn't go with {ON}=ray: copies on one node would have the same "
            "cores; write nodes, with which each rank is in a NUMA node, or leave it out",
        )
    elif BINDING in values.known and degree == 1:
        values.ignored[BINDING] = "a copy of one process may use all of its Ray node"


def _degree_on_cpu(subject: Subject, kind: DeviceKind) -> int:
    """Processes of the lmi engine that share a copy; max: one, which uses all cores, or those of
    the job."""
    degree, job = subject.values.get(DEGREE), subject.host.job
    if subject.backend != "lmi":
        return 1
    if kind == "cpu" and job is not None and (not isinstance(degree, int) or degree < 1):
        return job.size
    return max(1, degree) if isinstance(degree, int) else 1


def check_job(subject: Subject, kind: DeviceKind) -> None:
    """Refuse what doesn't go with several processes of a job."""
    job, values = subject.host.job, subject.values
    if job is None:
        return
    started = f"{job.started_by} has started {job.size} processes, "
    degree, key = values.get(DEGREE), DEGREE
    if subject.backend != "lmi" or kind != "cpu":
        where = subject.title if subject.backend != "lmi" else f"the lmi engine on {kind}"
        why = (
            f"and {where} takes no ranks from it in this version: start lmi without it{job.way_out}"
        )
    elif values.get(ON) == "ray":
        key, why = ON, f"and Ray starts those of {ON}=ray itself: start lmi without it"
    elif job.objection:
        started, why = "", job.objection
    elif isinstance(degree, int) and 0 < degree != job.size:
        why = f"and {DEGREE}={degree}: write {job.size}, or nothing, or start {degree}"
    else:
        return
    subject.refuse(key, f"{started}{why}")


def copies_of(subject: Subject, kind: DeviceKind) -> int:
    """Processes with an engine each; LMI's workers are that."""
    values = subject.values
    if subject.backend != "lmi":
        return 1
    own, other = ("gpu", "cpu") if kind == "cuda" else ("cpu", "gpu")
    _ignore_others(subject, own, other)
    keys = (OWN_COPIES, *((COPIES,) if kind == "cuda" else ()), *_WORKERS[own])
    given = [key for key in keys if isinstance(values.get(key), int)]
    number = values.get(given[0]) if given else None
    num_copies = max(1, number) if isinstance(number, int) else 1
    for key in given[1:]:
        values.ignored[key] = f"{given[0]}={number} says how many copies there are"
    key = ON if values.get(ON) == "ray" else given[0] if num_copies > 1 else ""
    if key and kind == "torch-cpu":
        why = f"{key}={values.get(key)} doesn't go with option.device={kind}"
        subject.refuse(key, f"{why}: leave one of them out")
    return 1 if kind == "torch-cpu" else num_copies


def most_copies_of(subject: Subject, kind: DeviceKind, num_copies: int) -> int:
    """By load, where there are processes of our engine; else one engine takes what comes."""
    values = subject.values
    if subject.backend != "lmi":
        return num_copies
    keys = _MOST["gpu" if kind == "cuda" else "cpu"]
    given = [key for key in keys if isinstance(values.get(key), int)]
    number = values.get(given[0]) if given else None
    has_processes = kind != "torch-cpu" and (
        num_copies > 1 or OWN_COPIES in values.known or values.get(ON) == "ray"
    )
    most = number if has_processes and isinstance(number, int) else 0
    if most > num_copies:
        values.ignored |= dict.fromkeys(given[1:], f"{given[0]}={number} says how many at most")
        return most
    why = f"there are {num_copies} copies, whatever the load" if has_processes else _ONE_ENGINE
    unused = {*given, "max_idle_time"} & values.known.keys()
    values.ignored |= dict.fromkeys(unused, why)
    return num_copies


def ignore_workers(subject: Subject) -> None:
    """Note that workers mean nothing where another library's engine has no copies by their keys."""
    given = WORKER_KEYS & subject.values.known.keys()
    subject.values.ignored |= dict.fromkeys(given, _ONE_ENGINE)


def _ignore_others(subject: Subject, own: str, other: str) -> None:
    """Note the keys of workers on other devices than the model's."""
    values = subject.values
    why = f"it counts workers on {other.upper()}s, and the model's are on {own.upper()}s"
    keys = (_WORKERS[other][0], _MOST[other][0])
    values.ignored |= {key: why for key in keys if key in values.known}


def _most_by_cores(
    subject: Subject, num_cores: int, degree: int, num_copies: int, most_copies: int
) -> int:
    """Of ranks, which have a core each; more copies couldn't be started."""
    most = max(num_copies, most_ranked_copies(num_cores, degree))
    if most_copies <= most:
        return most_copies
    key = next(key for key in _MOST["cpu"] if isinstance(subject.values.get(key), int))
    subject.problems.warn(
        subject.values.where(key),
        f"{key}={most_copies} with {DEGREE}={degree} would need {most_copies * degree} cores, one "
        f"for each process, and there are {num_cores} here: {most} copies is the most",
        key,
    )
    return most
