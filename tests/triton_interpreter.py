"""Triton's interpreter without what it computes and throws away: most of what small kernels cost.

For every launch, and for every call of a function within a kernel, it looks through all members of
``triton.language`` for those to replace. Here they are replaced once for each module of functions,
and stay so, since a process that interprets compiles nothing.

For every sum and product of integers it computes the exact one and compares it with the bounds of
their type, for an assertion that its kernels, which aren't compiled for debugging, leave out.

For every value it makes a table of numpy's types, to look one up, and a type of its shape anew.

Products it leaves to numpy's BLAS, of which some (OpenBLAS for Haswell) give a row other bits in
another place of a tile. Here they are of a row each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

Find = Callable[[Any], object]
Describe = Callable[[Any, Any, Any], None]


def quicken() -> None:
    """From now on; in a process that interprets kernels (``TRITON_INTERPRET=1``)."""
    from triton.language.core import block_type
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _replacing_once(interpreter._patch_lang, interpreter._LangPatchScope)
    interpreter._get_np_dtype = _remembering(interpreter._get_np_dtype)
    block_type.__init__ = _describing_once(block_type.__init__)
    type(builder).create_dot = _by_rows(type(builder).create_dot, interpreter.TensorHandle)


def _replacing_once(replace: Callable[[Any], object], scope: Callable[[], Any]) -> Any:
    seen: list[dict[str, object]] = []

    def replace_once(function: Callable[..., object]) -> Any:
        members = function.__globals__
        if not any(members is each for each in seen):
            seen.append(members)
            replace(function)
        return scope()  # which restores nothing

    return replace_once


def _remembering(find: Find) -> Find:
    """Types of the language have names; those of blocks can't be keys."""
    known: dict[str, object] = {}

    def numpy_type(kind: Any) -> object:
        if kind.name not in known:
            known[kind.name] = find(kind)
        return known[kind.name]

    return numpy_type


def _describing_once(describe: Describe) -> Describe:
    """Types of blocks, which nothing changes, from an element's type and a shape."""
    known: dict[tuple[object, ...], dict[str, object]] = {}

    def describe_once(block: Any, element: Any, shape: Any) -> None:
        key = (element.name, *[getattr(size, "value", size) for size in shape])
        if key in known:
            vars(block).update(known[key])
        else:
            describe(block, element, shape)
            known[key] = dict(vars(block))

    return describe_once


def _by_rows(dot: Callable[..., Any], handle: Callable[..., Any]) -> Callable[..., Any]:
    """``dot`` of [..., 1, K] rows for one of [..., M, K]."""

    def dot_by_rows(builder: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        a, b, d = (
            handle(np.expand_dims(each.data, axis), each.dtype)
            for each, axis in ((a, -2), (b, -3), (d, -2))
        )
        result = dot(builder, a, b, d, *how)
        return handle(result.data.squeeze(-2), result.dtype)

    return dot_by_rows
