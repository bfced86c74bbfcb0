"""Marks the function that reads requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .request_io import RequestInput, TextInput

__all__ = ["RequestInput", "TextInput", "input_formatter"]

F = TypeVar("F", bound=Callable[..., Any])


def input_formatter(function: F) -> F:
    """Mark ``function`` as the one that turns an ``Input`` into a ``RequestInput``."""
    return function
