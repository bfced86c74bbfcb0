"""Triton's interpreter, which replaces the members of its language less often.

For every launch, and for every call of a function within a kernel, it looks through all members of
``triton.language`` for those to replace: most of what small kernels cost. Here they are replaced
once for each module of functions, and stay so, since a process that interprets compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def replace_members_once() -> None:
    """From now on; in a process that interprets kernels (``TRITON_INTERPRET=1``)."""
    from triton.runtime import interpreter

    replace: Any = interpreter._patch_lang
    seen: list[dict[str, object]] = []

    def replace_once(function: Callable[..., object]) -> Any:
        members = function.__globals__
        if not any(members is each for each in seen):
            seen.append(members)
            replace(function)
        return interpreter._LangPatchScope()  # which restores nothing

    interpreter._patch_lang = replace_once
