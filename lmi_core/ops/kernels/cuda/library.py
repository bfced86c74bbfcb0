"""The shared library of csrc/cuda behind its C interface, loaded at first use.

``library_file`` says which file that is. The tests' emulator of a device is one, too: it takes host
tensors instead of CUDA ones.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmi_core.errors import UserError
from lmi_core.ops.kernels import library_file
from lmi_core.ops.kernels.cuda.arguments import parse

_log = logging.getLogger(__name__)

DEPENDENT_LAUNCH = "LMI_CUDA_DEPENDENT_LAUNCH"
"""1: kernels may start while the one before them ends, on GPUs from sm_90 on."""
DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.int8: 3,
    torch.float8_e4m3fn: 6,
    torch.float8_e5m2: 7,
}


class Library:
    """The functions of one library file; ``call`` raises what they report."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._functions = ctypes.CDLL(str(path))
            version = self._functions.lmi_cuda_version()
        except (OSError, AttributeError) as error:
            raise UserError(f"the CUDA kernels can't be loaded: {error}") from error
        if objection := library_file.unfit(path, version):
            raise UserError(objection)
        self._functions.lmi_cuda_error.restype = ctypes.c_char_p
        self._functions.lmi_cuda_notice.restype = ctypes.c_char_p
        self._num_notices = 0
        self._noticing = threading.Lock()
        self.is_emulator = bool(self._functions.lmi_cuda_is_emulator())
        self._functions.lmi_cuda_interface.restype = ctypes.c_char_p
        self.interface = parse(self._functions.lmi_cuda_interface().decode())
        for name, struct in self.interface.kernels.items():
            function = getattr(self._functions, f"lmi_cuda_{name}")
            function.argtypes = [ctypes.POINTER(struct), ctypes.c_void_p]

    def call(self, name: str, device: torch.device, **values: object) -> None:
        """Put a kernel onto the device's current stream; ``values`` are its struct's fields."""
        arguments = self.interface.kernels[name](**{k: _plain(v) for k, v in values.items()})
        stream = None
        if not self.is_emulator:
            stream = torch.cuda.current_stream(device).cuda_stream
        self.call_with(name, arguments, stream)

    def call_with(self, name: str, arguments: ctypes.Structure, stream: int | None = None) -> None:
        """Call a function on its struct, into which it may write."""
        function = getattr(self._functions, f"lmi_cuda_{name}")
        if function(ctypes.byref(arguments), stream) != 0:
            raise RuntimeError(self.error())

    def step_list_functions(self) -> dict[str, Callable[..., int]]:
        """Those of csrc/cuda/step_list.h that Python calls, by their names' last parts."""
        pointer = ctypes.c_void_p
        signatures: dict[str, tuple[Any, ...]] = {
            "create": (ctypes.c_int32, pointer, pointer),
            "destroy": (None, pointer),
            "add": (ctypes.c_int32, pointer, ctypes.c_int32, ctypes.c_int32, pointer),
            "set_adapter": (ctypes.c_int32, pointer, ctypes.c_int32, ctypes.c_uint64),
            "num_bytes": (ctypes.c_int64, pointer),
            "start": (ctypes.c_int32, pointer, pointer),
            "warm_up": (ctypes.c_int32, pointer),
            "capture": (ctypes.c_int32, pointer, ctypes.c_int32, ctypes.c_int32),
            "state": (None, pointer, pointer),
        }
        return self._typed(signatures, "step_list_")

    def open_cublaslt(self, path: str) -> str | None:
        """Open cuBLASLt by what dlopen takes; why it couldn't be, or None."""
        is_open = self._functions.lmi_cuda_open_cublaslt(path.encode()) == 0
        return None if is_open else self.error()

    def open_nccl(self, path: str) -> str | None:
        """As ``open_cublaslt``."""
        is_open = self._functions.lmi_cuda_open_nccl(path.encode()) == 0
        return None if is_open else self.error()

    def ranks_functions(self) -> dict[str, Callable[..., int]]:
        """Those of csrc/cuda/lmi_ranks.h that Python calls, by their names' last parts."""
        pointer, number = ctypes.c_void_p, ctypes.c_int32
        return self._typed(
            {
                "make_ranks_id": (number, pointer),
                "join_ranks": (number, ctypes.c_char_p, number, number, number, pointer),
                "abort_ranks": (number, pointer),
                "leave_ranks": (None, pointer),
            }
        )

    def _typed(
        self, signatures: dict[str, tuple[Any, ...]], prefix: str = ""
    ) -> dict[str, Callable[..., int]]:
        functions = {}
        for name, (result, *arguments) in signatures.items():
            function = getattr(self._functions, f"lmi_cuda_{prefix}{name}")
            function.restype, function.argtypes = result, arguments
            functions[name] = function
        return functions

    def unusable_because(self, device_type: str) -> str | None:
        """Why the current device of that type can't run the kernels; None if it can."""
        if self.is_emulator:
            return None if device_type == "cpu" else "an emulator has no GPU"
        if device_type != "cuda":
            return f"they run on CUDA devices, not on {device_type}"
        return None if self._functions.lmi_cuda_check_device() == 0 else self.error()

    def choose_launches(self) -> None:
        """Launch kernels as ``LMI_CUDA_DEPENDENT_LAUNCH`` asks for, from now on."""
        asked = os.environ.get(DEPENDENT_LAUNCH, "")
        if asked not in ("", "0", "1"):
            raise UserError(f"{DEPENDENT_LAUNCH}={asked}: 0 and 1 are allowed")
        if self._functions.lmi_cuda_use_dependent_launch(int(asked or "0")) != 0:
            _log.warning("%s=1 is not followed: %s", DEPENDENT_LAUNCH, self.error())

    def log_notices(self) -> None:
        """Log what the kernels had to say since the last time."""
        while self._functions.lmi_cuda_notice(self._num_notices) is not None:
            with self._noticing:
                text: bytes | None = self._functions.lmi_cuda_notice(self._num_notices)
                if text is not None:
                    self._num_notices += 1
                    _log.warning("%s", text.decode())

    def error(self) -> str:
        """What the last call in this thread that failed says."""
        text: bytes = self._functions.lmi_cuda_error()
        return text.decode()


def load() -> Library:
    """Raises UserError when the library is missing or doesn't fit this package."""
    path = library_file.find()
    if path is None:
        raise UserError(f"no CUDA kernels: {library_file.missing()}")
    return _load(path)


@functools.cache
def _load(path: Path) -> Library:
    return Library(path)


def call(name: str, like: Tensor, **values: object) -> None:
    """``Library.call`` on the device of ``like``."""
    load().call(name, like.device, **values)


def _plain(value: object) -> object:
    if isinstance(value, Tensor):
        assert value.is_contiguous()
        return value.data_ptr()
    return DTYPES[value] if isinstance(value, torch.dtype) else value
