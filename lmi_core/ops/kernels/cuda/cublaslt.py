"""Dense matrix products by cuBLASLt, which is opened at the first one."""

from __future__ import annotations

import functools
import logging
import os

import torch
from torch import Tensor

from lmi_core.ops.kernels.cuda import library

_log = logging.getLogger(__name__)

VARIABLE = "LMI_CUBLASLT_LIBRARY"
"""Names another file than the cuBLASLt that torch has loaded, or that the loader finds."""
WORKSPACE_BYTES = 32 << 20
_VERSIONS = (13, 12)

_workspaces: dict[tuple[torch.device, int], Tensor] = {}
"""By device and stream: products on one stream never run at once."""


def unusable_because() -> str | None:
    """Why cuBLASLt can't be had; None if it can."""
    return _open(library.load(), os.environ.get(VARIABLE, ""))


def can_unpack() -> bool:
    """Whether int4 weights may be unpacked for it; where not, the log says so once."""
    return _can_unpack(unusable_because())


def linear_dense(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """x @ weight^T + bias: [R, k], [n, k] in bf16 -> [R, n] in fp32, without a bias also in bf16;
    bias is fp32.

    Where cuBLASLt has no algorithm for the shape a kernel of our own runs, which the log says."""
    y = torch.empty(len(x), len(weight), dtype=out_dtype, device=x.device)
    library.call(
        "linear_dense",
        x,
        x=x,
        weight=weight,
        bias=bias,
        y=y,
        workspace=workspace_of(x.device),
        workspace_bytes=WORKSPACE_BYTES,
        num_rows=len(x),
        num_outputs=len(weight),
        num_inputs=x.shape[1],
        y_stride=len(weight),
        dtype=x.dtype,
        y_dtype=out_dtype,
    )
    library.load().log_notices()
    return y


@functools.cache
def _can_unpack(reason: str | None) -> bool:
    if reason is not None:
        _log.warning("linear_packed has one kernel for few and many rows: no cuBLASLt (%s)", reason)
    return reason is None


@functools.cache
def _open(kernels: library.Library, named: str) -> str | None:
    version = int((torch.version.cuda or "0").split(".")[0])
    versions = sorted(_VERSIONS, key=lambda other: other != version)
    names = [named] if named else [f"libcublasLt.so.{version}" for version in versions]
    reasons = []
    for name in names:
        reason = kernels.open_cublaslt(name)
        if reason is None:
            return None
        reasons.append(reason)
    return "; ".join(reasons)


def workspace_of(device: torch.device) -> Tensor:
    """[WORKSPACE_BYTES] of the current stream."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    workspace = _workspaces.get((device, stream))
    if workspace is None:
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        _workspaces[device, stream] = workspace
    return workspace
