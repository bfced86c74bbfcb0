"""Which logical cores each of several processes is bound to that compute beside each other.

A process in one NUMA node has its weights and KV cache there, since memory lies where it is touched
first. Source of the files: Linux, Documentation/ABI/stable/sysfs-devices-node and -system-cpu.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from lmi_core import _native

if TYPE_CHECKING:
    from lmi_core.settings.engine_config import EngineConfig

_T = TypeVar("_T")
Binding = Literal["auto", "nodes", "cores", "none"]
_ROOT = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True, order=True)
class Core:
    """A physical core; ``cpus`` are its logical ones that this process may use."""

    node: int
    package: int
    cpus: tuple[int, ...]


def found_cores(cpus: Collection[int], root: Path = _ROOT) -> list[Core]:
    """The cores of these logical ones, neighbours side by side. What ``root`` doesn't tell counts
    as one node, and a core each."""
    nodes = {
        cpu: int(path.parent.name.removeprefix("node"))
        for path in sorted(root.glob("node/node[0-9]*/cpulist"))
        for cpu in cpu_list(path.read_text())
    }
    by_core: dict[tuple[int, int, int], list[int]] = {}
    for cpu in sorted(cpus):
        topology = root / f"cpu/cpu{cpu}/topology"
        package, core = (_number(topology / name) for name in ("physical_package_id", "core_id"))
        key = (nodes.get(cpu, 0), max(package, 0), core if core >= 0 else -1 - cpu)
        by_core.setdefault(key, []).append(cpu)
    return sorted(Core(node, package, tuple(own)) for (node, package, _), own in by_core.items())


def cpu_list(text: str) -> list[int]:
    """As the kernel writes sets: 0-3,8."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus


def core_groups(
    cores: Sequence[Core], num_groups: int, binding: Binding
) -> list[tuple[int, ...]] | None:
    """The logical cores of each group. No two groups of ``cores`` have one in common, and none
    leaves its node where there are as many groups as nodes; ``nodes``: all that the group's nodes
    have; ``auto``: so where there are several nodes. None: nothing is bound, for which there are
    too few cores, or no use."""
    nodes = sorted({core.node for core in cores})
    is_free = binding == "none" or (binding == "auto" and len(nodes) == 1)
    if is_free or num_groups < 2 or len(cores) < num_groups:
        return None
    groups = _divided(cores, nodes, num_groups)
    if binding != "cores":
        groups = [
            [core for core in cores if core.node in {own.node for own in group}] for group in groups
        ]
    return [tuple(sorted(cpu for core in group for cpu in core.cpus)) for group in groups]


def _divided(cores: Sequence[Core], nodes: list[int], num_groups: int) -> list[list[Core]]:
    by_node = {node: [core for core in cores if core.node == node] for node in nodes}
    if num_groups <= len(nodes):
        return [
            [core for node in _part(nodes, i, num_groups) for core in by_node[node]]
            for i in range(num_groups)
        ]
    # As many groups for each node as its part of the cores says, at least one and no more than
    # cores.
    shares = dict.fromkeys(nodes, 1)
    for _ in range(num_groups - len(nodes)):
        roomy = [node for node in nodes if shares[node] < len(by_node[node])]
        shares[max(roomy, key=lambda node: len(by_node[node]) / shares[node])] += 1
    return [
        _part(by_node[node], i, num_parts)
        for node, num_parts in shares.items()
        for i in range(num_parts)
    ]


def _part(items: Sequence[_T], index: int, num_parts: int) -> list[_T]:
    size = len(items)
    return list(items[index * size // num_parts : (index + 1) * size // num_parts])


def own_groups(
    binding: Binding,
    degree: int,
    copy: int = 0,
    num_copies: int = 1,
    allowed: Sequence[Sequence[int]] = (),
) -> tuple[tuple[int, ...], ...]:
    """Of the ranks of one of so many copies, by what this process may use; empty: they are free.
    ``allowed``: what each rank's may, where others have started them: all that it says where they
    differ, but for ``none``."""
    if binding != "none" and _differ(allowed):
        return tuple(map(tuple, allowed))
    cores = found_cores(set(itertools.chain(*allowed)) or os.sched_getaffinity(0))
    groups = core_groups(cores, degree * num_copies, binding)
    return () if groups is None else tuple(groups[copy * degree : (copy + 1) * degree])


def num_own_cores(degree: int, num_copies: int = 1, allowed: Sequence[Sequence[int]] = ()) -> int:
    """Physical ones of each rank of each of so many copies; ``allowed`` as for ``own_groups``."""
    num_cores = _native.num_physical_cores()
    if _differ(allowed):
        return max(1, min(num_cores, *(len(found_cores(cpus)) for cpus in allowed)) // num_copies)
    return max(1, num_cores // (degree * num_copies))


def num_rank_threads(config: EngineConfig) -> int:
    """Worker threads of each of a model's ranks."""
    return config.num_threads or num_own_cores(config.tensor_parallel_degree)


def node_of(cpus: Collection[int], root: Path = _ROOT) -> int:
    """The NUMA node that has all of these; 0 where there is none, or nothing is said."""
    nodes = {core.node for core in found_cores(cpus, root)}
    return nodes.pop() if len(nodes) == 1 else 0


def most_ranked_copies(num_cores: int, degree: int) -> int:
    """Copies that have a physical core for each of their ranks, of more than one."""
    return max(1, num_cores // degree)


def weight_nodes(
    binding: Binding,
    degree: int,
    copy: int,
    num_copies: int,
    allowed: Sequence[Sequence[int]] = (),
) -> tuple[int, ...]:
    """Of each rank of a copy, the node whose copy of the packed weights it maps; 0: the first one,
    which the same rank of copy 0 has written in its own node. ``allowed`` as for ``own_groups``."""
    first, own = (
        [node_of(cpus) for cpus in own_groups(binding, degree, number, num_copies, allowed)]
        for number in (0, copy)
    )
    return tuple(0 if node == home else node for home, node in zip(first, own, strict=True))


def num_weight_nodes(
    binding: Binding, degree: int, num_copies: int, allowed: Sequence[Sequence[int]] = ()
) -> int:
    """In how many nodes so many copies have their weights; ``allowed`` as for ``own_groups``."""
    by_copy = [weight_nodes(binding, degree, n, num_copies, allowed) for n in range(num_copies)]
    return max((len(set(of_rank)) for of_rank in zip(*by_copy, strict=True)), default=1)


def _differ(allowed: Sequence[Sequence[int]]) -> bool:
    return len({tuple(cpus) for cpus in allowed}) > 1


@contextmanager
def bound_to(cpus: Sequence[int]) -> Iterator[None]:
    """This thread, and those that it starts, which stay so; none: as it is."""
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _number(path: Path) -> int:
    """-1 where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1
