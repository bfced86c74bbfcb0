"""A model's own ``model.py``: what it defines, found by reading it and never by running it.

Source: DJL-Serving's djl_python/service_loader.py.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from lmi_core.errors import ModelError
from lmi_core.files import open_regular

_MAX_BYTES = 1 << 20
_REFUSED_DECORATORS = ("prediction_handler", "init_handler")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Handler:
    """What a handler file defines; ``handle`` is None where it has formatters only."""

    path: Path
    handle: str | None
    input_formatter: str | None = None
    output_formatter: str | None = None


def read_handler(
    path: Path, handle: str = "handle", formatter: str | None = None, *, is_beside: bool = False
) -> Handler:
    """Read the handler file and return what it defines.

    ``formatter`` names a function that formats answers; otherwise a decorated one does. Raises
    ModelError if the file can't be parsed, imports of ``djl_python`` what there isn't, has
    neither the function ``handle`` nor a formatter (``is_beside`` another handler: it needs none),
    or ``handle`` can't be called with one argument.
    """
    tree = _parse(path)
    functions = {node.name: node for node in tree.body if isinstance(node, _Function)}
    found = functions.get(handle)
    handler = Handler(
        path,
        handle if found is not None else None,
        _decorated(functions, "input_formatter"),
        formatter if formatter in functions else _decorated(functions, "output_formatter"),
    )
    from lmi_core.config.artefacts.handler_imports import check_imports

    check_imports(path, tree)
    for decorator in _REFUSED_DECORATORS:
        if (name := _decorated(functions, decorator)) is not None:
            raise ModelError(f"{path}: {name} is a @{decorator}, which is not available here")
    if is_beside:
        return handler
    if found is not None:
        _check_arguments(path, found)
    elif handler.input_formatter is None and handler.output_formatter is None:
        names = ", ".join(sorted(functions)) or "no function"
        raise ModelError(
            f"{path} defines {names}, but not {handle}(inputs); add it, or name another in "
            "option.handler",
            field="option.handler",
        )
    return handler


def _parse(path: Path) -> ast.Module:
    try:
        with open_regular(path) as file:
            text = file.read()
    except OSError as error:
        raise ModelError(f"handler {path} can't be read ({error.strerror or error})") from None
    if len(text) > _MAX_BYTES:
        raise ModelError(f"handler {path} is larger than {_MAX_BYTES} bytes")
    try:
        return ast.parse(text, str(path))
    except SyntaxError as error:
        raise ModelError(f"{path}:{error.lineno or 1}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise ModelError(f"handler {path} is not Python ({error})") from None


def _decorated(functions: dict[str, _Function], decorator: str) -> str | None:
    for name, function in functions.items():
        for node in function.decorator_list:
            target = node.func if isinstance(node, ast.Call) else node
            if getattr(target, "id", getattr(target, "attr", None)) == decorator:
                return name
    return None


def _check_arguments(path: Path, function: _Function) -> None:
    arguments = function.args
    positional = len(arguments.posonlyargs) + len(arguments.args)
    required = positional - len(arguments.defaults)
    needs_names = any(default is None for default in arguments.kw_defaults)
    if required > 1 or needs_names or (positional == 0 and arguments.vararg is None):
        raise ModelError(
            f"{path}:{function.lineno}: {function.name} must take one argument, the inputs",
            field="option.handler",
        )
