"""The threads that execute steps: their order, what they take from others, their end."""

import itertools
import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lmi_core import _native
from tests.graph.test_graph import Tiny


def test_submit_signals_the_eventfd_once_per_step(worker):
    first, second = Tiny(seed=1), Tiny(seed=2)
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        for tiny in (first, second):
            tiny.step.add([1, 2], 0, 0, 0, "last")
            worker.submit(tiny.graph, tiny.step, fd)
        worker.drain()
        assert select.select([fd], [], [], 5)[0]
        assert os.eventfd_read(fd) == 2
    finally:
        os.close(fd)
    assert first.step.finished_ns <= second.step.started_ns  # in order


def test_the_workers_threads_take_no_signals(worker):
    tiny = Tiny()
    tiny.step.add([1], 0, 0, 0, "last")
    worker.run(tiny.graph, tiny.step)  # they have their names now
    masks = {}
    for task in Path("/proc/self/task").iterdir():
        status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        masks[status["Name"]] = int(status["SigBlk"], 16)
    for name in ("lmi-worker", "lmi-pool-1"):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            assert masks[name] >> number - 1 & 1, (name, number)


def test_an_idle_worker_uses_no_cpu():
    script = textwrap.dedent(
        """
        import time
        from lmi_core import _native
        worker = _native.Worker(2)
        spent_s = 1.0
        for _ in range(20):  # threads begin late on a busy machine
            before = time.process_time()
            time.sleep(0.4)
            spent_s = min(spent_s, time.process_time() - before)
            if spent_s < 0.008:
                break
        print(spent_s)
        worker.close()
        """
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 0.008


def test_workers_beside_each_other_take_turns(worker):
    narrow = _native.Worker(1, worker)
    assert (worker.num_threads, narrow.num_threads) == (2, 1)
    steps, graphs = [], []
    for number in range(6):
        tiny = Tiny(seed=1)
        tiny.step.add([1, 2], 0, 0, 0, "last")
        (narrow if number % 2 else worker).submit(tiny.graph, tiny.step, -1)
        steps.append(tiny.step)
        graphs.append((tiny.graph, tiny.logits))
    narrow.drain()
    for first, second in itertools.pairwise(steps):
        assert 0 < first.finished_ns <= second.started_ns
    assert len({graph.read(logits, 1).tobytes() for graph, logits in graphs}) == 1
    narrow.close()
    steps[0].clear()
    steps[0].add([1, 2], 0, 0, 0, "last")
    worker.run(graphs[0][0], steps[0])
    with pytest.raises(_native.NativeError, match="the worker beside is closed"):
        _native.Worker(1, narrow)


def test_a_closed_worker_refuses_steps():
    worker = _native.Worker(1)
    worker.close()
    worker.close()
    tiny = Tiny()
    tiny.step.add([1], 0, 0, 0, "last")
    with pytest.raises(_native.NativeError, match="closed"):
        worker.submit(tiny.graph, tiny.step, -1)
