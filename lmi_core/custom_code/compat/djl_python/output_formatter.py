"""Marks the function that formats answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .request_io import RequestOutput, Sequence, TextGenerationOutput, Token

__all__ = ["RequestOutput", "Sequence", "TextGenerationOutput", "Token", "output_formatter"]

F = TypeVar("F", bound=Callable[..., Any])


def output_formatter(function: F) -> F:
    """Mark ``function`` as the one that turns a ``RequestOutput`` into the text to send."""
    return function
