"""The other ranks of a model by torch or CUDA: processes that load their slice of the weights and
compute every step with rank 0, which tells them its inputs."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from lmi_core import _native
from lmi_core.errors import EngineError, UserError
from lmi_core.runners.cpu.core_groups import num_rank_threads
from lmi_core.runners.cpu.cpu_model import open_group
from lmi_core.runners.cpu.ranks import RankProcess
from lmi_core.runners.device.rank_group import TorchGroup

if TYPE_CHECKING:
    from lmi_core.models.smoothing import Smoothing
    from lmi_core.ops.device.step_arrays import StepArrays
    from lmi_core.ops.kernels.cuda.nccl import NcclRanks
    from lmi_core.runners.device.cuda_model import CudaModel
    from lmi_core.runners.step_memory import StepSizes
    from lmi_core.settings.engine_config import EngineConfig

log = logging.getLogger(__name__)

_MAIN = "lmi_core.runners.device.device_rank_process"
_SEEN_S = 1.0
"""In which the end of a process is seen that others have felt."""
_Met = TypeVar("_Met")


class DeviceRanks:
    """From their start to their end; they end with this process, whatever ends it. Their steps are
    launched from Python (``meet``, ``agree``, ``join``, ``begin``) or from C++ (``start_list``)."""

    def __init__(self, config: EngineConfig, smoothing: Smoothing | None) -> None:
        """Start the processes, which load their weights at once."""
        self._config = config
        self._num_ranks = config.tensor_parallel_degree
        self._is_loading, self._is_closing = True, False
        self._loss: Future[str] = Future()  # why one of them is no more
        self._ended: list[RankProcess] = []
        self._said: Exception | None = None
        self._group: _native.RankGroup | None = None
        self._meeting: NcclRanks | TorchGroup | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="lmi-ranks-")
        self._place = Path(self._folder.name) / "group"
        self._processes: list[RankProcess] = []
        self._num_threads_before = torch.get_num_threads()
        torch.set_num_threads(num_rank_threads(config))  # the others do so
        try:
            for rank in range(1, self._num_ranks):
                self._processes.append(RankProcess(rank, config.job, _MAIN))
            own, level = replace(config, speculation=None), logging.getLogger().level
            for process in self._processes:
                process.send((own, smoothing, process.rank, level))
        except BaseException:
            self.close()
            raise

    @property
    def is_lost(self) -> bool:
        """Whether one of them ended or failed, so that no step is right any more."""
        return self._loss.done() or (self._group is not None and self._group.is_lost)

    def check(self) -> None:
        """Raise EngineError where one is lost."""
        if self._loss.done():
            raise EngineError(self._loss.result())

    def meet(self, device: torch.device, chosen: Mapping[str, str]) -> TorchGroup:
        """Their group by torch, once all have their weights; ``chosen``: the implementations of
        ops that all take. Raises what kept one of them from it, EngineError where one ended without
        a word."""
        self._tell_loaded(("torch", (str(self._place), dict(chosen))))
        self._watch_all()
        with self.explained():
            group = self._met(lambda: TorchGroup(self._place, 0, self._num_ranks, device))
            self._meeting = group
            self.check()
        return group

    def agree(self, num_blocks: int) -> int:
        """The blocks that all can have, of how many this rank could; none computes a step from
        now on until they ``join``. Raises as ``meet``."""
        with self.explained():
            self._tell("measured")
            return self._least(num_blocks)

    def join(self) -> None:
        """Return when all have caches of the blocks agreed on; raises as ``meet``."""
        with self.explained():
            self._receive()
        self._has_loaded()
        for process in self._processes:
            threading.Thread(target=process.listen, daemon=True).start()

    def order(self, name: str, *arguments: Any) -> list[Future[Any]]:
        """As ``Ranks.order``; sent with the next step, or with what is asked before."""
        return self._call("order", name, arguments)

    def ask(self, name: str, *arguments: Any) -> list[Future[Any]]:
        """As ``Ranks.ask``, but blocking: it is sent behind orders that are on their way."""
        answers = self._call("ask", name, arguments)
        for process in self._processes:
            with suppress(EngineError):  # ``listen`` fails it then
                process.send()
        return answers

    def _call(self, kind: str, name: str, arguments: tuple[Any, ...]) -> list[Future[Any]]:
        return [process.call(kind, name, arguments, is_held=True) for process in self._processes]

    def begin(self, arrays: StepArrays) -> None:
        """Have all compute a step, as this rank does next. Raises EngineError where one is lost."""
        self.check()
        self._tell(arrays)

    def lose(self, why: str) -> None:
        """No step is right from now on: the other processes are killed, and what waits for them
        here comes to an end. In any thread; the first reason counts."""
        if self._group is not None:
            self._group.lose(why)
            why = self._group.reason
        try:
            self._loss.set_result(why)
        except InvalidStateError:
            return
        if not self._is_loading:  # who loads raises it
            log.error("%s: the model's steps fail from now on", why)
        for process in self._processes:
            process.kill()
        if self._meeting is not None:
            self._meeting.abort()

    def start_list(self, model: CudaModel, others_bytes: int) -> _native.RankGroup:
        """Start ``model``, rank 0's, while all start theirs. Returns the group that all serve from
        then on; raises as ``meet``."""
        from lmi_core.ops.kernels.cuda.nccl import NcclRanks, make_id

        group_id = make_id()
        self._tell_loaded(("nccl", group_id))
        self._receive()  # all are about to meet
        self._watch_all()
        with self.explained():
            ranks = self._met(lambda: NcclRanks(group_id, 0, self._num_ranks, model.device))
            self._meeting = ranks
            self.check()
            model.start(others_bytes, ranks.address, self._least)
            self._group = open_group(self._config, model.sizes)
            for process in self._processes:
                process.send_descriptor(self._group.descriptor)
            self._receive()
            self.check()
        self._has_loaded()
        threading.Thread(target=self._watch_group, args=(self._group,), daemon=True).start()
        return self._group

    def close(self) -> None:
        """No step may be in flight. Idempotent."""
        self._is_closing = True
        if self._group is not None:
            self._group.close()
        if self.is_lost or self._meeting is None:
            for process in self._processes:
                process.kill()
        for process in self._processes:
            process.end()
        if self._meeting is not None:
            self._meeting.close()  # it may wait for the others
        self._folder.cleanup()
        torch.set_num_threads(self._num_threads_before)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """While all load: what goes wrong here because a rank ended is what that one said, or that
        it ended."""
        try:
            yield
        except Exception as error:
            if error is self._said or isinstance(error, UserError):
                raise
            wait([self._loss], _SEEN_S)
            for process in self._ended[:1]:
                process.receive()  # it raises what the rank said
            self.check()
            raise

    def _met(self, meet: Callable[[], _Met]) -> _Met:
        """What ``meet`` returns; EngineError where a rank is lost, for which it may wait for ever,
        in a thread that is left to it."""
        met: Future[_Met] = Future()

        def run() -> None:
            try:
                met.set_result(meet())
            except BaseException as error:
                met.set_exception(error)

        threading.Thread(target=run, name="meeting", daemon=True).start()
        either: list[Future[Any]] = [met, self._loss]
        wait(either, return_when=FIRST_COMPLETED)
        if not met.done():
            self.check()
        return met.result()

    def _least(self, num_blocks: int) -> int:
        """Of what all ranks could have."""
        least = min(num_blocks, *(int(number) for [number] in self._receive()))
        self._tell(least)
        return least

    def _tell(self, value: Any) -> None:
        for process in self._processes:
            process.send(value)

    def _tell_loaded(self, value: Any) -> None:
        """What comes next, once all have their weights."""
        self._receive()
        self._tell(value)

    def _receive(self) -> list[list[Any]]:
        try:
            return [process.receive() for process in self._processes]
        except Exception as error:
            self._said = error
            raise

    def _has_loaded(self) -> None:
        self._is_loading = False
        for process in self._processes:
            process.is_loading = False

    def _watch_all(self) -> None:
        for process in self._processes:
            threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    def _watch(self, process: RankProcess) -> None:
        words = process.last_words()
        self._ended.append(process)
        if not self._is_closing:
            self.lose(f"rank {process.rank} of {self._num_ranks} ended ({words})")

    def _watch_group(self, group: _native.RankGroup) -> None:
        """A rank that fails may hang instead of ending, as may this one's device."""
        group.wait_until_over()
        if group.is_lost:
            self.lose(group.reason)


def receive_group(
    connection: socket.socket, config: EngineConfig, sizes: StepSizes, rank: int
) -> _native.RankGroup:
    """The group that rank 0 has sent."""
    _, [descriptor], _, _ = socket.recv_fds(connection, 1, 1)
    with ExitStack() as received:
        received.callback(os.close, descriptor)
        return open_group(config, sizes, rank=rank, descriptor=descriptor)
