"""The handler that a configuration names or a model brings: found and checked, not run here.

Source: DJL-Serving's PyModel.java.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lmi_core.config.artefacts.handler import Handler, read_handler
from lmi_core.config.paths import is_file
from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.errors import ModelError

_KEY = "option.entryPoint"
_FORMATTER = "option.output_formatter"
_BUILT_IN = "djl_python."
BUILT_IN_FORMATTERS = ("json", "jsonlines", "sse")


def find_handler(values: Values, directory: Path | None, problems: Problems) -> Handler | None:
    """Return the custom code of the model in ``directory``, or None where a built-in handler
    answers and formats.

    Code is taken from the directory that the configuration names, never from what is downloaded. An
    explicit entry point wins over the model's own ``model.py``, whose formatters count beside a
    built-in one. Faults go to ``problems``.
    """
    given = values.get(_KEY)
    is_built_in = str(given).startswith(_BUILT_IN)
    if given is None or is_built_in:
        path = None if directory is None else directory / "model.py"
        path = path if path is not None and is_file(path) else None
        where = str(path or "")
    else:
        path, where = _named(str(given), directory, values, problems), values.where(_KEY)
    if path is None:
        return None if given is None or is_built_in else Handler(Path(str(given)), "handle")
    name = str(values.get("option.handler") or "handle")
    try:
        found = read_handler(path, name, _formatter(values), is_beside=is_built_in)
    except ModelError as error:
        problems.error(where, str(error), _KEY)
        return None if is_built_in else Handler(path, "handle")
    return _beside(found, str(given), problems) if is_built_in else found


def _beside(found: Handler, entry_point: str, problems: Problems) -> Handler | None:
    """What of ``model.py`` counts beside a built-in entry point: its formatters."""
    if found.handle is not None:
        problems.warn(
            str(found.path),
            f"{found.handle} isn't called, as in LMI: {_KEY}={entry_point} answers the requests; "
            f"leave that out for {found.path.name} to answer them",
            _KEY,
        )
    if found.input_formatter is None and found.output_formatter is None:
        return None
    return replace(found, handle=None)


def _formatter(values: Values) -> str | None:
    """The function that option.output_formatter names, if it isn't a built-in format."""
    name = values.get(_FORMATTER)
    return None if name is None or name in BUILT_IN_FORMATTERS else str(name)


def check_formatter(handler: Handler | None, values: Values, problems: Problems) -> None:
    """Note a formatter that doesn't exist, and one that has no say beside ``handler``."""
    name = _formatter(values)
    if handler is not None and handler.handle is not None:
        return
    if name is not None and (handler is None or handler.output_formatter != name):
        allowed = ", ".join(BUILT_IN_FORMATTERS)
        problems.error(
            values.where(_FORMATTER),
            f"{_FORMATTER}={name[:80]} is neither one of {allowed} nor a function of model.py",
            _FORMATTER,
        )
    elif name is None and values.get(_FORMATTER) and handler and handler.output_formatter:
        problems.warn(
            values.where(_FORMATTER),
            f"{_FORMATTER}={values.get(_FORMATTER)} has no effect: {handler.output_formatter} of "
            f"{handler.path.name} formats the answers",
            _FORMATTER,
        )


def _named(given: str, directory: Path | None, values: Values, problems: Problems) -> Path | None:
    """Return the path of a handler file named by the configuration, if it is here."""
    if given.startswith(("http://", "https://")):
        problems.error(
            values.where(_KEY),
            f"{_KEY}={given[:200]}: code is not fetched from the network; put the file into the "
            "model's directory and write its name",
            _KEY,
        )
        return None
    if directory is None:
        return None
    if given.endswith(".py"):
        return directory / given
    *packages, name = given.split(".")
    module = directory.joinpath(*packages, f"{name}.py")
    if all(part.isidentifier() for part in (*packages, name)) and is_file(module):
        return module
    problems.error(
        values.where(_KEY),
        f"{_KEY}={given[:200]} is neither a built-in handler ({_BUILT_IN}...), nor a module or a "
        ".py file in the model's directory",
        _KEY,
    )
    return None
