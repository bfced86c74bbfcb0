"""NCCL, by which ranks with a CUDA device each meet: opened when there are some."""

from __future__ import annotations

import ctypes
import logging
import os
import threading

import torch

from lmi_core.errors import EngineError
from lmi_core.ops.kernels.cuda import library

_log = logging.getLogger(__name__)

VARIABLE = "LMI_NCCL_LIBRARY"
"""Names another file than the NCCL that torch has loaded, or that the loader finds."""
_NAME = "libnccl.so.2"
_END_TIMEOUT_S = 10.0


def open_nccl() -> library.Library:
    """The kernels' library, with NCCL opened in it. Raises EngineError where there is none."""
    kernels = library.load()
    if reason := kernels.open_nccl(os.environ.get(VARIABLE) or _NAME):
        raise EngineError(f"ranks on GPUs meet by NCCL, which can't be opened: {reason}")
    return kernels


def make_id() -> bytes:
    """What the ranks of one group find one another by. Raises EngineError."""
    kernels = open_nccl()
    made = (ctypes.c_char * kernels.interface.numbers["RANKS_ID_BYTES"])()
    if kernels.ranks_functions()["make_ranks_id"](made) != 0:
        raise EngineError(kernels.error())
    return bytes(made)


class NcclRanks:
    """The ranks of a model as one of them meets the others."""

    def __init__(self, group_id: bytes, rank: int, num_ranks: int, device: torch.device) -> None:
        """Blocking, until all ranks are there. Raises EngineError."""
        kernels = open_nccl()
        self._functions = kernels.ranks_functions()
        made = ctypes.c_void_p()
        own = (group_id, num_ranks, rank, device.index or 0, ctypes.byref(made))
        if self._functions["join_ranks"](*own) != 0:
            raise EngineError(kernels.error())
        self.address: int = made.value or 0
        """What kernels are given of them."""
        self._error = kernels.error
        self._starting = threading.Lock()
        self._ending: threading.Thread | None = None
        self._has_ended = False

    def abort(self) -> threading.Thread:
        """In any thread: end what waits for others on the device, for good. The thread that is
        returned does so at once, and ends when NCCL has nothing left: the others' processes are
        gone, and graphs destroyed. The process ends where a call of NCCL is stuck."""
        with self._starting:
            if self._ending is None:
                self._ending = threading.Thread(target=self._abort, name="nccl-end", daemon=True)
                self._ending.start()
            return self._ending

    def close(self) -> None:
        """When no step is in flight, and the others' processes are gone. Idempotent."""
        self.abort().join(_END_TIMEOUT_S)
        if not self._has_ended:
            _log.warning("NCCL doesn't let go of ranks that ended: their memory stays taken")
        elif self.address:
            address, self.address = self.address, 0
            self._functions["leave_ranks"](address)

    def _abort(self) -> None:
        if self._functions["abort_ranks"](self.address) != 0:
            _log.critical("%s: the process ends, for nothing else ends that", self._error())
            os._exit(1)
        self._has_ended = True
