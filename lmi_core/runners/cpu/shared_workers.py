"""The workers of a process, which execute the steps of its models one after the other."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import ClassVar

from lmi_core._native import Worker


@dataclass(slots=True)
class _Shared:
    worker: Worker
    num_users: int = 0


class SharedWorkers:
    """One for each number of threads and set of cores, counted by its users; the last one to leave
    joins its threads."""

    _lock: ClassVar = threading.Lock()
    _workers: ClassVar[dict[tuple[int, frozenset[int]], _Shared]] = {}

    @classmethod
    def acquire(cls, num_threads: int) -> Worker:
        """Of so many threads, on the cores that this thread may use."""
        key = num_threads, frozenset(os.sched_getaffinity(0))
        with cls._lock:
            if key not in cls._workers:
                beside = next((each.worker for each in cls._workers.values()), None)
                cls._workers[key] = _Shared(Worker(num_threads, beside))
            shared = cls._workers[key]
            shared.num_users += 1
            return shared.worker

    @classmethod
    def release(cls, worker: Worker) -> None:
        with cls._lock:
            [key] = (key for key, each in cls._workers.items() if each.worker is worker)
            shared = cls._workers[key]
            shared.num_users -= 1
            if shared.num_users == 0:
                del cls._workers[key]
                worker.close()

    @classmethod
    def forget(cls) -> None:
        """In a child of fork(), which has the objects but not their threads: start anew."""
        cls._lock, cls._workers = threading.Lock(), {}


os.register_at_fork(after_in_child=SharedWorkers.forget)
