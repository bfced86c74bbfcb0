"""Cores of processes that compute beside each other, on made inventories and here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmi_core.runners.cpu import core_groups as cores_of_processes
from lmi_core.runners.cpu.core_groups import (
    Binding,
    Core,
    bound_to,
    core_groups,
    cpu_list,
    found_cores,
    node_of,
    num_weight_nodes,
    weight_nodes,
)


def machine(root: Path, nodes: list[str], siblings: int = 0) -> Path:
    """Files of a machine whose nodes have these logical cores; ``siblings``: how far apart two
    logical ones of a core are, 0: each is a core."""
    for node, cpus in enumerate(nodes):
        directory = root / f"node/node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(cpus + "\n")
        for cpu in cpu_list(cpus):
            topology = root / f"cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{node}\n")
            (topology / "core_id").write_text(f"{cpu % siblings if siblings else cpu}\n")
    return root


def test_cores_are_found_by_node_with_their_siblings(tmp_path: Path) -> None:
    root = machine(tmp_path, ["0-1,4-5", "2-3,6-7"], siblings=4)
    assert found_cores(range(8), root) == [
        Core(0, 0, (0, 4)),
        Core(0, 0, (1, 5)),
        Core(1, 1, (2, 6)),
        Core(1, 1, (3, 7)),
    ]
    assert found_cores({1, 2, 6}, root) == [Core(0, 0, (1,)), Core(1, 1, (2, 6))]
    assert [node_of(cpus, root) for cpus in ({1, 4}, {2, 6}, {1, 2})] == [0, 1, 0]
    assert found_cores({3, 1}, tmp_path / "none") == [Core(0, 0, (1,)), Core(0, 0, (3,))]


@pytest.mark.parametrize(
    ("nodes", "num", "binding", "expected"),
    [
        (["0-3", "4-7"], 2, "cores", ["0-3", "4-7"]),
        (["0-3", "4-7"], 4, "cores", ["0-1", "2-3", "4-5", "6-7"]),
        (["0-3", "4-7"], 4, "auto", ["0-3", "0-3", "4-7", "4-7"]),
        (["0-3", "4-7"], 3, "cores", ["0-1", "2-3", "4-7"]),
        (["0-1", "2-7"], 4, "cores", ["0-1", "2-3", "4-5", "6-7"]),
        (["0-1", "2-3", "4-5", "6-7"], 2, "nodes", ["0-3", "4-7"]),
        (["0-7"], 3, "cores", ["0-1", "2-4", "5-7"]),
        (["0-7"], 2, "nodes", ["0-7", "0-7"]),
        (["0-7"], 2, "auto", None),
        (["0-3", "4-7"], 1, "cores", None),
        (["0-3", "4-7"], 9, "cores", None),
        (["0-3", "4-7"], 2, "none", None),
    ],
)
def test_groups_stay_within_nodes(
    tmp_path: Path, nodes: list[str], num: int, binding: Binding, expected: list[str] | None
) -> None:
    cores = found_cores(range(8), machine(tmp_path, nodes))
    groups = core_groups(cores, num, binding)
    assert groups == (expected and [tuple(cpu_list(cpus)) for cpus in expected])


@pytest.mark.parametrize(
    ("degree", "num_copies", "expected"),
    [
        (1, 2, [(0,), (1,)]),
        (1, 4, [(0,), (0,), (1,), (1,)]),
        (2, 1, [(0, 0)]),  # each rank has written its file in its own node
        (2, 2, [(0, 0), (1, 1)]),
    ],
)
def test_copies_of_weights_are_where_others_would_read_another_nodes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    degree: int,
    num_copies: int,
    expected: list[tuple[int, ...]],
) -> None:
    root = machine(tmp_path, ["0-3", "4-7"])
    monkeypatch.setattr(
        cores_of_processes, "found_cores", lambda cpus, _=None: found_cores(cpus, root)
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    nodes = [weight_nodes("auto", degree, copy, num_copies) for copy in range(num_copies)]
    assert nodes == expected
    assert num_weight_nodes("auto", degree, num_copies) == len(set(expected))
    own = [range(4, 6), range(6, 8)][:degree]  # of a job's processes, which share a node
    assert num_weight_nodes("auto", degree, num_copies, own) == 1


def test_a_thread_is_bound_and_free_again() -> None:
    allowed = os.sched_getaffinity(0)
    one = min(allowed)
    with bound_to([one]):
        assert os.sched_getaffinity(0) == {one}
    with bound_to([]):
        assert os.sched_getaffinity(0) == allowed
    assert os.sched_getaffinity(0) == allowed
