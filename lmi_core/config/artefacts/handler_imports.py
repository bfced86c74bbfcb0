"""What handlers import of LMI's package ``djl_python``, compared with what is here of it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from lmi_core.errors import ModelError

_PACKAGE = "djl_python"
_COMPAT = Path(__file__).parents[2] / "custom_code" / "compat"


def check_imports(path: Path, tree: ast.Module) -> None:
    """Raise ModelError for a module or name of ``djl_python`` that the handler ``tree``, read from
    ``path``, needs and that isn't here. Imports inside of ``try`` and of functions that may never
    run are not looked at. Where LMI's own package is installed, it is what handlers get."""
    if importlib.util.find_spec(_PACKAGE) is not None:
        return
    for line, module, name in _imports(tree.body):
        if module != _PACKAGE and not module.startswith(f"{_PACKAGE}."):
            continue
        if _has(module, name):
            continue
        what = module if name is None else f"{module}.{name}"
        known = ", ".join(sorted(p.stem for p in (_COMPAT / _PACKAGE).glob("[a-z]*.py")))
        raise ModelError(
            f"{path}:{line}: {what} isn't here: of {_PACKAGE} there are Input, Output and {known}; "
            "the engine takes the place of LMI's own handlers, so leave the model to it and keep "
            "formatters, or load it with its library"
        )


def check_installed(path: Path, model_dir: Path) -> None:
    """Raise ModelError for a package that the handler in ``path`` imports at its top level and that
    is neither installed here nor in ``model_dir``."""
    for line, module, _ in _imports(ast.parse(path.read_bytes()).body):
        package = module.partition(".")[0]
        is_beside = (model_dir / package).is_dir() or (model_dir / f"{package}.py").is_file()
        if package == _PACKAGE or is_beside or importlib.util.find_spec(package) is not None:
            continue
        raise ModelError(
            f"{path}:{line}: imports {package}, which isn't installed: name it in a "
            "requirements.txt beside the file, or install it"
        )


def _imports(body: list[ast.stmt]) -> Iterator[tuple[int, str, str | None]]:
    """Line, module and, of ``from``, name of every import at the top level."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)


def _has(module: str, name: str | None) -> bool:
    place = _COMPAT.joinpath(*module.split("."))
    if place.is_dir():
        inner = place / f"{name}.py"
        return name is None or inner.is_file() or name in _names(place / "__init__.py")
    file = place.with_suffix(".py")
    return file.is_file() and (name in (None, "*") or name in _names(file))


def _names(file: Path) -> set[str]:
    """What a module of the package has at its top level."""
    names: set[str] = set()
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names
