"""The handler that a configuration names or a model brings: found and checked, not run here.

Source: LMI format reference, entry point.
"""

from __future__ import annotations

from pathlib import Path

from lmi_core.config.artefacts.handler import Handler, read_handler
from lmi_core.config.paths import is_file
from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.errors import ModelError

_KEY = "option.entryPoint"
_FORMATTER = "option.output_formatter"
BUILT_IN_FORMATTERS = ("json", "jsonlines", "sse")


def find_handler(values: Values, directory: Path | None, problems: Problems) -> Handler | None:
    """Return the custom code of the model in ``directory``, or None where a built-in handler
    answers and formats.

    Code is taken from the directory that the configuration names, never from what is downloaded. An
    explicit entry point wins over the model's own ``model.py``. Faults go to ``problems``.
    """
    given = values.get(_KEY)
    if given is None:
        path = None if directory is None else directory / "model.py"
        path = path if path is not None and is_file(path) else None
        where = str(path or "")
    elif not str(given).endswith(".py"):
        return None
    else:
        path, where = _named(str(given), directory, values, problems), values.where(_KEY)
    if path is None:
        return None if given is None else Handler(Path(str(given)), "handle")
    try:
        return read_handler(path, str(values.get("option.handler") or "handle"), _formatter(values))
    except ModelError as error:
        problems.error(where, str(error), _KEY)
        return Handler(path, "handle")


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
    return None if directory is None else directory / given
