"""The handler that a configuration names or a model brings: found and checked, never run.

Source: LMI format reference, entry point.
"""

from __future__ import annotations

from pathlib import Path

from lmi_core.config.artefacts.handler import Handler, read_handler
from lmi_core.config.merge import Values
from lmi_core.config.model_files import ModelFiles
from lmi_core.config.problem import Problems
from lmi_core.errors import ModelError

_KEY = "option.entryPoint"


def find_handler(
    values: Values, files: ModelFiles, directory: Path | None, problems: Problems
) -> Handler | None:
    """Return the custom handler of a model, or None where a built-in one answers.

    An explicit entry point wins over the model's own ``model.py``. Faults go to ``problems``.
    """
    given = values.get(_KEY)
    if given is None:
        path, where = files.handler, str(files.handler or "")
    elif not str(given).endswith(".py"):
        return None
    else:
        path, where = _named(str(given), directory, values, problems), values.where(_KEY)
    if path is None:
        return None if given is None else Handler(Path(str(given)), "handle")
    try:
        return read_handler(path, str(values.get("option.handler") or "handle"))
    except ModelError as error:
        problems.error(where, str(error), _KEY)
        return Handler(path, "handle")


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
