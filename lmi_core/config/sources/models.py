"""The list of models to serve, from the command line, the server's keys and the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lmi_core.config.artefacts.archives import Archives, is_archive_url
from lmi_core.config.artefacts.unpack import SUFFIXES, is_archive
from lmi_core.config.paths import exists, is_dir
from lmi_core.config.problem import Problems
from lmi_core.config.sources.command_line import Invocation
from lmi_core.config.sources.load_models import (
    ModelEntry,
    local_path,
    name_of,
    name_of_hub_id,
    parse_load_models,
    scan_store,
)
from lmi_core.config.sources.merge import Values
from lmi_core.config.sources.origin import Precedence, Setting
from lmi_core.errors import ModelError
from lmi_core.weights.gguf.directory import is_gguf

HUB_NAME = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(/[\w.-]+)?)(:(?P<file>[\w.-]+))?", re.ASCII)
"""A repository's id, and the GGUF file of it that is meant."""
CONTAINER_STORE = Path("/opt/ml/model")
"""Model store of the reference's containers and of SageMaker, used if nothing else is named."""

_OWN_MODEL = (Precedence.TGI_VARIABLE, Precedence.FLAG, Precedence.OVERRIDE)
"""Places whose model id names a model of its own rather than the content of a store."""

_HUB_VARIABLES = {
    "HF_MODEL_ID": "option.model_id",
    "HF_REVISION": "option.revision",
    "HF_MODEL_REVISION": "option.revision",
    "HF_TASK": "option.task",
}
HUB_ONLY = frozenset(_HUB_VARIABLES)
"""Variables that describe the model named by ``HF_MODEL_ID`` and no other."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A model to serve: its entry, its directory if it is local, and settings that come with it."""

    entry: ModelEntry
    directory: Path | None
    settings: tuple[Setting, ...] = ()
    is_downloaded: bool = False
    """The directory came from another machine, code of its own included."""


def list_models(
    invocation: Invocation,
    server: Values,
    shared: Values,
    environ: Mapping[str, str],
    archives: Archives,
    problems: Problems,
    *,
    default_model: Path | None = None,
) -> list[Listed]:
    """Return the models to serve; ``default_model``, or an error, if none is named."""
    if invocation.models:
        _warn_of_unused(environ, problems)
        if "load_models" in server.known:
            why = "is not used: the command line names the models"
            problems.warn(server.where("load_models"), f"load_models {why}", "load_models")
            server.ignored["load_models"] = why
        named = [_named(text, archives, problems) for text in invocation.models]
        return [model for model in named if model is not None]
    entries = _entries(server, shared, problems)
    listed = [m for e in entries or () if (m := list_entry(e, archives, problems)) is not None]
    if environ.get("HF_MODEL_ID"):
        listed.append(_from_hub_variable(environ))
    else:
        _warn_of_unused(environ, problems)
    if not listed and "option.model_id" in shared.known:
        listed.append(_from_model_id(shared))
    if not listed and entries is None and default_model is not None:
        entry = ModelEntry(str(default_model), name_of(str(default_model)), "default")
        return [Listed(entry, default_model)]
    if not listed and entries is None and not problems.errors:
        problems.error(
            "",
            "no model is named: give a directory with serving.properties, --model-id, or set "
            "HF_MODEL_ID or SERVING_LOAD_MODELS",
        )
    return listed


def _entries(server: Values, shared: Values, problems: Problems) -> list[ModelEntry] | None:
    """Return what ``load_models`` and the model store list; None if neither says anything."""
    text = server.get("load_models")
    entries = None
    if isinstance(text, str):
        entries = parse_load_models(text, server.where("load_models"), problems)
    store = server.get("model_store")
    if entries is None and isinstance(store, str):
        return scan_store(Path(store), server.where("model_store"), problems)
    names_another = shared.precedence("option.model_id") in _OWN_MODEL
    if entries is None and not names_another and is_dir(CONTAINER_STORE):
        return scan_store(CONTAINER_STORE, str(CONTAINER_STORE), problems) or None
    if entries is None and isinstance(text, str):
        problems.error(server.where("load_models"), "load_models=ALL needs a model_store")
    return entries


def _named(text: str, archives: Archives, problems: Problems) -> Listed | None:
    """A model of the command line: directory, properties, archive, GGUF, s3:// prefix or hub id."""
    path = Path(text)
    if exists(path):
        if is_gguf(path):
            setting = Setting("option.model_id", text, Precedence.FLAG, "command line")
            return Listed(ModelEntry(text, name_of(path.stem), text), None, (setting,))
        if path.is_file() and is_archive(path.name):
            return list_entry(ModelEntry(text, name_of(text), text), archives, problems)
        if not path.is_dir() and path.suffix != ".properties":
            problems.error(
                text,
                "isn't a directory; give one, a serving.properties, a GGUF file or an archive "
                f"({', '.join(SUFFIXES)})",
            )
            return None
        directory = path if path.is_dir() else path.parent
        name = name_of(str(directory.absolute()))
        return Listed(ModelEntry(str(directory), name, text), directory)
    if text.startswith("s3://") or (HUB_NAME.fullmatch(text) and not text.startswith(".")):
        setting = Setting("option.model_id", text, Precedence.FLAG, "command line")
        return Listed(ModelEntry(text, name_of_hub_id(text), text), None, (setting,))
    problems.error(text[:200], "is neither a path that exists, a hub id, nor an s3:// prefix")
    return None


def list_entry(entry: ModelEntry, archives: Archives, problems: Problems) -> Listed | None:
    """Find a model of ``load_models``, or note an error; its endpoint is stronger than its file."""
    settings = []
    if entry.engine:
        settings.append(Setting("engine", entry.engine, Precedence.ENDPOINT, entry.where))
    if entry.devices:
        devices = ";".join(entry.devices)
        settings.append(Setting("load_on_devices", devices, Precedence.ENDPOINT, entry.where))
    path = local_path(entry.url)
    url = entry.url if path is None else str(path)
    directory = Path(url)
    if "://" not in url and not exists(directory):
        problems.error(entry.where, f"model {url[:200]!r} doesn't exist")
        return None
    if "://" not in url and directory.is_dir():
        return Listed(entry, directory, tuple(settings))
    is_url = is_archive_url(url)
    if is_url or "://" not in url:
        try:
            directory = archives.directory(url)
        except ModelError as error:
            problems.error(entry.where, f"model {entry.name}: {error}")
            return None
        return Listed(entry, directory, tuple(settings), is_downloaded=is_url)
    if url.startswith("s3://"):
        settings.append(Setting("option.model_id", url, Precedence.ENDPOINT, entry.where))
        return Listed(entry, None, tuple(settings))
    problems.error(
        entry.where,
        f"model URL {url[:200]!r} is not supported; give a directory, an archive ("
        f"{', '.join(SUFFIXES)}) by path or by http, or an s3:// prefix",
    )
    return None


def _from_hub_variable(environ: Mapping[str, str]) -> Listed:
    """``HF_MODEL_ID`` adds a model as if a properties file of its own had been written.

    So it is stronger than ``OPTION_MODEL_ID``. A directory is a model like any other, with its own
    properties, and weaker than keys that say where the model is.
    """
    model_id = environ["HF_MODEL_ID"]
    settings = [
        Setting(key, environ[variable], Precedence.FILE, variable)
        for variable, key in _HUB_VARIABLES.items()
        if environ.get(variable)
    ]
    if is_dir(Path(model_id)):
        entry = ModelEntry(model_id, name_of(model_id), "HF_MODEL_ID")
        weaker = Setting("option.model_id", model_id, Precedence.ALIAS_VARIABLE, "HF_MODEL_ID")
        others = tuple(s for s in settings if s.key != "option.model_id")
        return Listed(entry, Path(model_id), (*others, weaker))
    entry = ModelEntry(model_id, name_of_hub_id(model_id), "HF_MODEL_ID")
    return Listed(entry, None, tuple(settings))


def _warn_of_unused(environ: Mapping[str, str], problems: Problems) -> None:
    """Note the variables that describe the model of ``HF_MODEL_ID`` where it isn't served."""
    for variable, key in _HUB_VARIABLES.items():
        if not environ.get(variable):
            continue
        why = "is not used: it belongs to the model that HF_MODEL_ID names"
        if variable == "HF_MODEL_ID":
            why = "is not used: the command line names the models"
        problems.warn(variable, why, key)


def _from_model_id(shared: Values) -> Listed:
    model_id, where = str(shared.get("option.model_id")), shared.where("option.model_id")
    if where.startswith("OPTION_"):
        name = "model"
    elif is_dir(Path(model_id)):
        name = name_of(str(Path(model_id).absolute()))
    else:
        name = name_of_hub_id(model_id)
    return Listed(ModelEntry(model_id, name, where), None)
