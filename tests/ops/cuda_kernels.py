"""The CUDA kernels for a test: on a GPU, or in the emulator of one that ``make build`` builds.

``LMI_TEST_RACES=1`` takes the emulator that finds races (``make test-races``).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmi_core.ops.kernels import library_file
from lmi_core.ops.kernels.cuda import cublaslt, library, nccl
from tests.watched import IS_WATCHED

_BUILT = Path(__file__).parents[2] / "build/native"
RACES = _BUILT / "liblmi_cuda_races.so"
EMULATOR = RACES if IS_WATCHED else _BUILT / "liblmi_cuda_emulator.so"
CUBLASLT_EMULATOR = EMULATOR.with_name("liblmi_cublaslt_emulator.so")
NCCL_EMULATOR = EMULATOR.with_name("liblmi_nccl_emulator.so")


def use_cuda_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels of ``lmi_core.ops.kernels.cuda`` run on ``device``, or skip the test."""
    if device.type == "cpu":
        if not EMULATOR.exists():
            pytest.skip("the emulator is not built: make build")
        monkeypatch.setenv(library_file.VARIABLE, str(EMULATOR))
        monkeypatch.setenv(cublaslt.VARIABLE, str(CUBLASLT_EMULATOR))
        monkeypatch.setenv(nccl.VARIABLE, str(NCCL_EMULATOR))
    elif library_file.find() is None:
        pytest.skip("the CUDA kernels are not built: make cuda-all")
    reason = library.load().unusable_because(device.type)
    if reason is not None:
        pytest.skip(f"the CUDA kernels can't run here: {reason}")
