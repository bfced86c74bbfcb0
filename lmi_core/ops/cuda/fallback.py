"""What runs where a kernel doesn't cover a case."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

_log = logging.getLogger(__name__)


def fallback(op: str, device: torch.device, reason: str) -> Callable[..., Any]:
    """The next best implementation of ``op``; the log says once that it runs and why."""
    return _fallback(op, device.type, reason)


@functools.cache
def _fallback(op: str, device_type: str, reason: str) -> Callable[..., Any]:
    from lmi_core.ops import select

    name = select.usable(op, device_type)[0]
    _log.warning("%s runs in %s: the CUDA kernel has no %s", op, name, reason)
    function: Callable[..., Any] = getattr(importlib.import_module(select.MODULES[name]), op)
    return function
