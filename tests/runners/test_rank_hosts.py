"""Commands started as mpirun, srun and torchrun do it: one answers, ranks run in the others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmi_core.runners.cpu.core_groups import num_own_cores, own_groups
from tests.cli.test_native import post
from tests.server.models.test_ranks import children_of

pytestmark = pytest.mark.timeout(120)

Start = Callable[[int, int, str], dict[str, str]]
ON_CPU = ("--device", "cpu", "--threads", "1", "-o", "tp_invariant=true")
PROMPT = {"inputs": "What is 7 + 5?", "parameters": {"max_new_tokens": 8}}


def mpirun(rank: int, size: int, job: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        "PMIX_NAMESPACE": job,
    }


def torchrun(rank: int, size: int, job: str) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": job,
    }


def srun(rank: int, size: int, job: str) -> dict[str, str]:
    return {
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_PROCID": str(rank),
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "1",
    }


@contextmanager
def started(start: Start, *command: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes, of which the other one comes first."""
    job, processes = uuid.uuid4().hex, []
    try:
        for rank in (1, 0):
            processes.insert(
                0,
                subprocess.Popen(
                    [sys.executable, "-m", "lmi_core", *command],
                    env={**os.environ, **start(rank, 2, job)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                ),
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("start", [torchrun, srun])
def test_one_process_answers_with_the_bits_of_one_alone(start: Start) -> None:
    command = ("generate", "Once upon a time", "--max-new-tokens", "20", "--temperature", "1")
    alone = subprocess.run(
        [sys.executable, "-m", "lmi_core", *command, *ON_CPU],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert alone.returncode == 0, alone.stderr
    with started(start, *command, *ON_CPU) as processes:
        outputs = [process.communicate(timeout=60) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
    assert [out for out, _ in outputs] == [alone.stdout, ""]


def test_a_lost_rank_is_replaced_in_its_host_and_a_lost_host_ends_the_server() -> None:
    with started(mpirun, "serve", *ON_CPU, "--port", "0") as [server, host]:
        assert server.stdout is not None
        match = re.match(r"Listening on (\S+)", server.stdout.readline())
        assert match is not None
        while not server.stdout.readline().startswith("  ready"):
            pass
        url = f"{match[1]}/invocations"
        answer = post(url, PROMPT)
        assert answer[0] == 200
        [rank] = children_of(host.pid)
        host.send_signal(signal.SIGTERM)  # the server has it, too, and lets requests end
        os.kill(rank, signal.SIGKILL)
        assert post(url, PROMPT) == answer
        [other] = children_of(host.pid)
        assert other != rank
        host.kill()
        _, words = server.communicate(timeout=60)
        assert server.returncode == 1
        assert "process 1 of 2, which mpirun had started, is gone" in words
        assert not runs(other)


def test_refusals_end_all_processes() -> None:
    command = ("serve", "--device", "cpu", "-o", "tensor_parallel_degree=4")
    with started(mpirun, *command) as [server, host]:
        _, words = server.communicate(timeout=60)
        assert server.returncode == 2
        assert "mpirun has started 2 processes, and option.tensor_parallel_degree=4" in words
        assert host.communicate(timeout=60) == ("", "")
        assert host.returncode == 0


def test_processes_that_do_not_come_are_named() -> None:
    code = (
        "import sys\nfrom lmi_core.runners.cpu import rank_hosts\nrank_hosts._MEET_S = 0.2\n"
        "from lmi_core.cli import main\nsys.exit(main(['generate', 'x']))"
    )
    for rank, words in (
        (0, "process 1 of 2, which srun has started, isn't found"),
        (1, "the first of 2 processes that srun has started didn't come"),
    ):
        environ = {**os.environ, **srun(rank, 2, uuid.uuid4().hex)}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 4
        assert words in result.stderr


def test_cores_that_a_job_has_divided_stay_divided() -> None:
    one, other = (0, 1), (2, 3)
    assert own_groups("auto", 2, allowed=[one, other]) == (one, other)
    assert num_own_cores(2, 1, [one, other]) <= 2
    assert own_groups("none", 2, allowed=[one, other]) == ()
    assert own_groups("auto", 2, allowed=[one, one]) == own_groups("auto", 2)
