"""Which devices a configuration runs on, in how many copies, or why it can't have them.

Sources: DJL-Serving's ModelInfo.java, number of workers and devices; TGI's launcher, resolution of
shards.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.config.table import BY_KEY
from lmi_core.config.table.capabilities import BACKENDS
from lmi_core.config.targets.host import Host
from lmi_core.config.targets.placed_subject import (
    DEGREE,
    ON,
    OWN,
    RAY_ADDRESS,
    STAGES,
    Subject,
)
from lmi_core.config.targets.placement_on_cpu import WORKER_KEYS, check_job, ignore_workers, on_cpu
from lmi_core.config.targets.placement_on_ray import on_gpus_of_nodes
from lmi_core.settings.placement import DEVICE_NAMES, VISIBLE, DeviceKind, Placement

_DEVICE = "option.device"
_NAMING = ("load_on_devices", "option.device_id", "option.device_map")
"""Keys that name devices, the strongest first."""
_SPREAD = frozenset({"auto", "balanced", "balanced_low_0", "sequential"})
"""Maps of layers over all devices."""
_NAME = re.compile(r"(?:gpu|nc|cuda:)?(\d{1,4})", re.ASCII)


def place(
    values: Values,
    host: Host,
    backend: str,
    system: str,
    problems: Problems,
    *,
    mpi_mode: bool = False,
    is_demo: bool = False,
) -> Placement:
    """Decide where the configuration ``values``, written for ``system``, runs on ``backend``.

    What would leave a visible device unused, or give another degree than asked for, is an error
    that says what to write. ``option.device=cpu`` means the CPU, where a degree is a number of
    processes of the lmi engine.
    """
    subject = Subject(values, host, backend, system, mpi_mode, is_demo, problems)
    if backend == "lmi" and not subject.is_on_ray and RAY_ADDRESS in values.known:
        values.ignored[RAY_ADDRESS] = "the model is served on this machine, without option.on=ray"
    if backend not in ("lmi", "handler"):
        ignore_workers(subject)
    kind, named = _kind(subject)
    check_job(subject, kind)
    if kind in ("cpu", "torch-cpu"):
        return on_cpu(subject, kind)
    return on_gpus_of_nodes(subject) if subject.is_on_ray else _on_devices(subject, kind, named)


def _kind(subject: Subject) -> tuple[DeviceKind, tuple[int, ...] | None]:
    """The kind of device, and the numbers of those that the configuration names."""
    values, host = subject.values, subject.host
    device, (key, named) = values.get(_DEVICE), _named_devices(subject)
    if device == "torch-cpu":
        return "torch-cpu", None
    if device == "cpu" or (device != "cuda" and named == ()):
        _check_hidden(subject)
        return "cpu", None
    if named == ():
        subject.refuse(_DEVICE, f"option.device=cuda, but {key}={values.get(key)}; keep one")
        named = None
    if device != "cuda" and subject.is_demo:
        return "cpu", None
    if device == "cuda" and subject.is_on_ray:
        return "cuda", named
    if host.is_neuron and subject.backend not in OWN:
        return "neuron", named
    if host.num_gpus:
        _check_torch(subject)
        _check_not_on_ray(subject)
        return "cuda", named
    if device == "cuda" or named:
        wanted = "option.device=cuda" if device == "cuda" else f"{key}={values.get(key)}"
        subject.refuse(
            _DEVICE if device == "cuda" else key,
            f"{wanted}, but no GPU is visible here: write --device cpu, or look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES",
        )
    elif host.is_neuron:
        subject.refuse(
            "",
            f"{host.num_neuron_cores} Neuron cores are visible, and {subject.title} would leave "
            "them unused: option.rolling_batch=vllm serves the model there with vLLM's plugin, "
            "--device cpu on the CPU",
        )
    else:
        _check_degree_on_cpu(subject)
    return "cpu", None


def _named_devices(subject: Subject) -> tuple[str, tuple[int, ...] | None]:
    """The key that names devices and their numbers; none for the CPU, None: no key names any."""
    for key in _NAMING:
        given = subject.values.get(key)
        if given is None or str(given).strip() in ("", "*") or given == -1:
            continue
        names = [name.strip() for name in re.split("[;,]", str(given).lower())]
        if names in (["cpu"], ["-1"]):
            return key, ()
        found = [match for name in names if (match := _NAME.fullmatch(name)) is not None]
        if len(found) == len(names) and len(set(names)) == len(names):
            return key, tuple(int(match[1]) for match in found)
        if key == "load_on_devices":
            subject.refuse(
                key, f"{key}={str(given)[:80]} is neither *, cpu, nor devices like gpu0;gpu1"
            )
    return "", None


def _check_torch(subject: Subject) -> None:
    objection = subject.host.torch_objection
    if objection and subject.backend in OWN:
        subject.refuse(
            _DEVICE,
            f"{subject.visible('cuda')}, but {objection}{subject.on_cpu_instead}",
        )


def _check_not_on_ray(subject: Subject) -> None:
    if subject.is_on_ray:
        subject.refuse(
            ON,
            f"{ON}=ray, and {subject.visible('cuda')} here, which says nothing of the nodes: write "
            "--device cuda for copies on their GPUs, --device cpu for copies on their CPUs",
        )


def _check_hidden(subject: Subject) -> None:
    """Other libraries take what they see."""
    host = subject.host
    if subject.backend in OWN or subject.backend == "handler" or not host.num_devices:
        return
    variable = VISIBLE["neuron" if host.is_neuron else "cuda"]
    subject.refuse(
        _DEVICE,
        f"{subject.title} runs on the devices that it sees, not on the CPU: start the server with "
        f"{variable}= (empty), or write --prefer-native for the lmi engine",
    )


def _check_degree_on_cpu(subject: Subject) -> None:
    for key in (DEGREE, STAGES):
        degree = subject.values.get(key)
        if isinstance(degree, int) and degree > 1 and subject.backend != "handler":
            subject.refuse(
                key,
                f"{key}={degree} asks for {degree} devices, and no GPU is visible here: --device "
                f"cpu serves the model on the CPU{_by_processes(subject, key, degree)}",
            )


def _by_processes(subject: Subject, key: str, degree: int) -> str:
    if key == DEGREE and subject.backend == "lmi":
        nodes = "; --device cuda on the GPUs of the cluster's nodes" if subject.is_on_ray else ""
        return f", by {degree} processes with a slice of the weights each{nodes}"
    return ", where one process uses all cores"


def _on_devices(subject: Subject, kind: DeviceKind, named: tuple[int, ...] | None) -> Placement:
    values, host = subject.values, subject.host
    if subject.backend == "lmi":
        why = "there is a copy on each GPU, or as many as option.num_copies says"
        keys = (*WORKER_KEYS, "max_idle_time")
        values.ignored |= {key: why for key in keys if key in values.known}
    ids = tuple(range(host.num_devices)) if named is None else named
    stages = values.get(STAGES)
    num_stages = stages if isinstance(stages, int) else 1
    degree = _degree(subject, num_stages)
    num_devices = degree * num_stages
    groups = _groups(subject, ids, num_devices, is_named=named is not None)
    if not groups:
        key = subject.copies_key if subject.copies_key in values.known else DEGREE
        subject.refuse(key, _too_few(subject, degree, num_devices, kind))
    elif subject.backend != "handler" and _check_capabilities(subject, groups, kind):
        _check_unused(subject, groups, kind, is_named=named is not None)
    names = subject.names(kind)
    return Placement(
        device=kind,
        tensor_parallel_degree=degree,
        pipeline_parallel_degree=num_stages,
        num_copies=max(1, len(groups)),
        most_copies=max(1, len(groups)),
        device_ids=tuple(tuple(names[i] for i in group) for group in groups),
        num_cores=host.num_cores // max(1, len(groups)),
        memory_bytes=host.gpu_memory_bytes if kind == "cuda" else 0,
    )


def _asked_degree(subject: Subject) -> object:
    """What the keys ask for, None if they don't."""
    values = subject.values
    asked = values.get(DEGREE)
    if asked is None and subject.system == "tgi":
        return {"true": "max", "false": 1}.get(str(values.get("option.sharded")))
    if asked is None and subject.backend == "transformers":
        return "max" if values.get("option.device_map") in _SPREAD else None
    return asked


def _degree(subject: Subject, num_stages: int) -> int:
    """Devices of a stage; -1: one, or with MPI all."""
    degree = _asked_degree(subject)
    if degree is None and subject.backend in OWN:
        degree = 1
    if degree is None:
        degree = BY_KEY[DEGREE].default_for(subject.system)
    if isinstance(degree, int) and (degree > 0 or not subject.mpi_mode):
        return max(1, degree)
    return max(1, subject.host.num_devices // num_stages)


def _groups(
    subject: Subject, ids: tuple[int, ...], num_devices: int, *, is_named: bool
) -> tuple[tuple[int, ...], ...]:
    """The devices of each copy; none if there are too few.

    A named device is the first of a copy's, as in LMI. A launcher of TGI starts one copy where it
    is told how many shards there are.
    """
    visible = subject.host.num_devices
    asked = subject.values.get(subject.copies_key)
    if is_named:
        groups = tuple(tuple(range(i, i + num_devices)) for i in ids)
        taken = [i for group in groups for i in group]
        if max(taken) >= visible or len(set(taken)) < len(taken):
            return ()
        if isinstance(asked, int) and asked != len(groups):
            key, _ = _named_devices(subject)
            subject.refuse(
                subject.copies_key,
                f"{subject.copies_key}={asked}, and {key}={subject.values.get(key)} names devices "
                f"for {len(groups)}: write {len(groups)}, or leave one of them out",
            )
        return groups
    groups = tuple(
        ids[i : i + num_devices] for i in range(0, len(ids) - num_devices + 1, num_devices)
    )
    if isinstance(asked, int):
        return groups[:asked] if asked <= len(groups) else ()
    if subject.system == "tgi" and _asked_degree(subject) is not None:
        return groups[:1]
    return groups


def _too_few(subject: Subject, degree: int, num_devices: int, kind: DeviceKind) -> str:
    values, visible, name = subject.values, subject.host.num_devices, DEVICE_NAMES[kind]
    key, named = _named_devices(subject)
    if named and max(named) >= visible:
        return f"{key}={values.get(key)}, but {subject.visible(kind)}, counted from 0"
    copies, way = values.get(subject.copies_key), f"write {DEGREE}=max"
    if isinstance(copies, int):
        if num_devices <= visible:
            way = f"write {subject.copies_key}={visible // num_devices}"
        num_devices *= copies
    asked = [
        f"{key}={values.get(key)}"
        for key in (*_NAMING, DEGREE, STAGES, subject.copies_key)
        if key in values.known and values.get(key) is not None
    ]
    return (
        f"{' with '.join(asked) or f'a copy on {degree} devices'} needs {num_devices} {name}s, but "
        f"{subject.visible(kind)}: {way}, or name at most {visible}"
        f"{subject.on_cpu_instead}"
    )


def _check_unused(
    subject: Subject, groups: Sequence[Sequence[int]], kind: DeviceKind, *, is_named: bool
) -> None:
    """Devices that the configuration names are all that it means."""
    used = [i for group in groups for i in group]
    values, visible = subject.values, subject.host.num_devices
    if used != list(range(len(used))) and "option.device_map" not in values.known:
        subject.refuse(
            next(key for key in _NAMING if key in values.known),
            f"{subject.title} runs on the first {DEVICE_NAMES[kind]}s that the server sees: start "
            f"it with {subject.restricted(used, kind)}",
        )
    if is_named or len(used) == visible:
        return
    num_devices = len(groups[0])
    sizes = [n for n in range(1, visible + 1) if visible % n == 0]
    way = f"write {DEGREE}={' or '.join(map(str, sizes))}, or "
    copies = subject.copies_key
    key = next((key for key in (copies, DEGREE, "option.sharded") if key in values.known), DEGREE)
    if visible % num_devices == 0:  # more copies than a launcher starts, or than are asked for
        way = f"write {DEGREE}={visible}, or " if subject.can("parallel.tensor") else ""
    if subject.system == "tgi" and isinstance(_asked_degree(subject), int):
        _warn_of_idle(subject, key, used, kind)
        return
    if key == copies:
        way = f"write {copies}={visible // num_devices}, or "
    subject.refuse(
        key,
        f"{subject.visible(kind)}, and {key}={values.get(key)} would use {len(used)} of them: "
        f"{way}start the server with {subject.restricted(used, kind)}",
    )


def _warn_of_idle(subject: Subject, key: str, used: Sequence[int], kind: DeviceKind) -> None:
    """A launcher that is told a number of shards starts so many, whatever else there is."""
    names = subject.names(kind)
    idle = ", ".join(name for i, name in enumerate(names) if i not in used)
    subject.problems.warn(
        subject.values.where(key),
        f"{subject.visible(kind)}, and {key}={subject.values.get(key)} is {len(used)} of them: "
        f"{idle} stay idle, as with the launcher; {subject.restricted(used, kind)} hides them",
        key,
    )


def _check_capabilities(
    subject: Subject, groups: Sequence[Sequence[int]], kind: DeviceKind
) -> bool:
    """Whether the backend can do it."""
    values, num_devices = subject.values, len(groups[0])
    name, can_copy = DEVICE_NAMES[kind], subject.can("parallel.copies")
    if num_devices > 1 and not subject.can("parallel.tensor"):
        key = next(
            (key for key in (DEGREE, "option.sharded", STAGES) if key in values.known), DEGREE
        )
        one = (
            ""
            if can_copy
            else f" and start the server with {subject.restricted(groups[0][:1], kind)}"
        )
        subject.refuse(
            key,
            f"{key}={values.get(key)}: {num_devices} {name}s would share a copy, which "
            f"{subject.title} can't do in this version: write {DEGREE}=1{one}, or "
            f"option.rolling_batch=vllm ({BACKENDS['vllm'].installation})"
            f"{subject.on_cpu_instead}",
        )
    elif subject.backend == "lmi" and isinstance(stages := values.get(STAGES), int) and stages > 1:
        subject.refuse(
            STAGES,
            f"{STAGES}={stages}, and {subject.title} has no pipelines: write "
            f"{DEGREE}={num_devices} for as many GPUs, or option.rolling_batch=vllm "
            f"({BACKENDS['vllm'].installation})",
        )
    elif len(groups) > 1 and not can_copy:
        spread = "option.device_map=auto spreads a copy over all of them; "
        subject.refuse(
            DEGREE,
            f"{subject.visible(kind)}, but {subject.title} runs one copy in this version, on "
            f"{num_devices} of them: {spread if subject.backend == 'transformers' else ''}start "
            f"the server with {subject.restricted(groups[0], kind)}{subject.on_cpu_instead}",
        )
    else:
        return True
    return False
