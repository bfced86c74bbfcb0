"""What runs where a kernel doesn't cover a case."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

_log = logging.getLogger(__name__)


def fallback(
    op: str, device: torch.device, reason: str, owner: str = "the CUDA kernel"
) -> Callable[..., Any]:
    """The next best implementation of ``op``; the log says once that it runs and why."""
    return _fallback(op, device.type, f"{owner} has no {reason}")


def next_best(op: str, device: torch.device) -> Callable[..., Any]:
    """The implementation of ``op`` that runs there unasked."""
    return _next_best(op, device.type)[1]


@functools.cache
def _fallback(op: str, device_type: str, reason: str) -> Callable[..., Any]:
    name, function = _next_best(op, device_type)
    _log.warning("%s runs in %s: %s", op, name, reason)
    return function


@functools.cache
def _next_best(op: str, device_type: str) -> tuple[str, Callable[..., Any]]:
    from lmi_core.ops.kernels import select

    name = select.usable(op, device_type)[0]
    return name, select.function(op, name)
