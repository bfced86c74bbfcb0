"""Models that are registered while the server runs: what may be loaded, and how.

A model's URL must lie under the model store or match ``model_url_pattern``, so that whoever reaches
the management routes doesn't choose among all files of the machine; requests may bring models from
URLs of the pattern only. A model's own Python code runs only with ``allow_custom_code``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmi_core.config.artefacts.adapter_directories import check_adapter_code
from lmi_core.config.model_config import ModelConfig
from lmi_core.config.paths import is_dir
from lmi_core.config.problem import Problems
from lmi_core.config.resolve import resolve_entry
from lmi_core.config.secure_mode import check_files
from lmi_core.config.sources.load_models import (
    ModelEntry,
    local_path,
    name_of,
    parse_devices,
    parse_engine,
)
from lmi_core.config.sources.models import CONTAINER_STORE
from lmi_core.config.targets.server_config import ServerConfig
from lmi_server.dialects.base import HttpError
from lmi_server.models.loading import recipe_of
from lmi_server.models.model import Recipe

_WHERE = "POST /models"
_KEYS = {
    "job_queue_size": "job_queue_size",
    "batch_size": "batch_size",
    "max_batch_delay": "max_batch_delay",
    "max_idle_time": "max_idle_time",
    "min_worker": "minWorkers",
    "max_worker": "maxWorkers",
}
"""Parameters of the call and the model's keys that they set."""
_NAMES = ("url", "model_name", "model_version", "engine", "device")
_NAME = re.compile(r"[\w][\w.:@+-]{0,199}")


class ConfiguredRegistrar:
    """Resolves models as those of the start: under the server's own arguments and variables."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], server: ServerConfig
    ) -> None:
        self._argv = tuple(argv)
        self._environ = dict(environ)
        self._server = server

    @property
    def loads_on_request(self) -> bool:
        """Whether requests may bring models: where a pattern says which."""
        return self._server.model_url_pattern is not None

    async def requested_recipe(self, arguments: Mapping[str, str]) -> Recipe:
        """As ``recipe``, but only the pattern counts; what it doesn't match is a 404."""
        pattern, url = self._server.model_url_pattern, arguments["url"]
        if pattern is None or not re.fullmatch(pattern, url):
            message = f"Permission denied: {url[:200]} (it does not match model_url_pattern)"
            raise HttpError(404, "ModelNotFoundException", message)
        return await self.recipe(arguments)

    async def recipe(self, arguments: Mapping[str, str]) -> Recipe:
        """Raises HttpError for what isn't allowed, ConfigError for what can't be served."""
        for name in arguments:
            if name not in _NAMES and name not in _KEYS:
                known = ", ".join((*_NAMES, *_KEYS, "synchronous", "replace"))
                raise _bad_request(f"Parameter {name[:40]!r} is unknown; known are {known}")
        url = arguments.get("url")
        if not url:
            raise _bad_request("Parameter url is required.")
        entry = _entry(url, arguments)
        self._check_url(url, "a model must lie under")
        keys = {key: arguments[name] for name, key in _KEYS.items() if name in arguments}
        model, _ = await asyncio.to_thread(
            resolve_entry, entry, keys, self._argv, self._environ, None, self._check_code
        )
        return recipe_of(model, self._server, self._environ, name=arguments.get("model_name"))

    def adapter_path(self, src: str, model_url: str) -> Path:
        """The directory of an adapter: by the rules of models, or within its model's directory.
        Raises HttpError for one that isn't allowed or isn't there, ModelError for one with code."""
        path = local_path(src)
        directory = local_path(model_url) if model_url.startswith("file:") else None
        if path is None:
            raise _bad_request(
                f"src is {src[:200]!r}; adapters are loaded from directories of this machine only"
            )
        if directory is None or not _is_under(path, directory):
            self._check_url(src, "an adapter must lie in its model's directory, under")
        if not is_dir(path):
            raise HttpError(424, "ModelException", f"{src[:200]} is not a directory")
        check_adapter_code(path)
        check_files([path], self._environ)
        return path

    def _check_url(self, url: str, rule: str) -> None:
        """``rule``: how the message begins to say what is allowed."""
        pattern = self._server.model_url_pattern
        if pattern is not None and re.fullmatch(pattern, url):
            return
        store = self._server.model_store
        if store is None and is_dir(CONTAINER_STORE):
            store = CONTAINER_STORE
        path = local_path(url)
        if store is not None and path is not None and _is_under(path, store):
            return
        allowed = "no model_store is configured" if store is None else f"the model store is {store}"
        raise HttpError(
            403,
            "ForbiddenException",
            f"Permission denied: {url[:200]} ({rule} the model store or match model_url_pattern; "
            f"{allowed})",
        )

    def _check_code(self, model: ModelConfig) -> None:
        if not self._server.allow_custom_code and model.code is not None:
            raise HttpError(
                403,
                "ForbiddenException",
                f"The model {model.name} has code of its own ({model.code}), which this server "
                "runs only with --allow-custom-code",
            )


def _is_under(path: Path, store: Path) -> bool:
    """Whether the path, wherever its links lead, is in the store."""
    try:
        return path.resolve().is_relative_to(store.resolve())
    except (OSError, ValueError, RuntimeError):
        return False


def _entry(url: str, arguments: Mapping[str, str]) -> ModelEntry:
    name = arguments.get("model_name") or name_of(url)
    version = arguments.get("model_version")
    for what, text in (("model_name", name), ("model_version", version)):
        if text is not None and not _NAME.fullmatch(text):
            raise _bad_request(
                f"Parameter {what} is {text[:40]!r}; it must be 1 to 200 letters, digits and "
                "._:@+-, and begin with a letter, a digit or _"
            )
    problems = Problems()
    engine = parse_engine(arguments.get("engine", ""), _WHERE, problems)
    devices = parse_devices(arguments.get("device", ""), _WHERE, problems)
    if problems.errors:
        raise _bad_request("; ".join(problem.message for problem in problems.errors))
    path = local_path(url)
    return ModelEntry(
        url=url if path is None else str(path),
        name=name,
        where=_WHERE,
        version=version,
        engine=engine,
        devices=devices,
    )


def _bad_request(message: str) -> HttpError:
    return HttpError(400, "BadRequestException", message)
