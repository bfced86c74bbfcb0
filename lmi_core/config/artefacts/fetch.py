"""A model's files, wherever the configuration says they are, as a checked local directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lmi_core.config.artefacts.cache import download_root
from lmi_core.config.artefacts.hub import check_hub, fetch_config_from_hub, fetch_from_hub
from lmi_core.config.artefacts.local import Check, check_adapter, check_model
from lmi_core.config.artefacts.model_source import ModelSource
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.errors import LmiError, ModelError
from lmi_core.weights.gguf.directory import file_patterns, model_directory, named_file

if TYPE_CHECKING:
    from lmi_core.config.artefacts.progress import Progress


def fetch(
    source: ModelSource,
    server: ServerConfig,
    *,
    environ: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    with_code: bool = False,
) -> Path:
    """Return a local directory with the model's files, complete as far as their headers tell;
    ``with_code``, also with Python code that comes with the model.

    Raises ModelError if they can't be had or are broken, MissingExtraError if a client library
    is needed for it. Blocking: call it from a thread.
    """
    return _fetch(source, server, check_model, environ, progress, with_code=with_code)


def fetch_config(source: ModelSource, server: ServerConfig, environ: Mapping[str, str]) -> None:
    """Have the config.json of a model that isn't here, by which its backend is chosen. Whatever is
    wrong is for ``fetch`` to say. Blocking."""
    if server.offline:
        return
    if source.kind == "hub" and source.file:
        with suppress(LmiError):
            _fetch(source, server, check_model, environ)
    elif source.kind == "hub":
        fetch_config_from_hub(source.location, source.revision, server.hub_cache, environ)
    elif source.kind == "s3":
        from lmi_core.config.artefacts.s3 import fetch_config_from_s3

        fetch_config_from_s3(source.location, download_root(server, environ), environ)


def check_source(
    source: ModelSource,
    server: ServerConfig,
    environ: Mapping[str, str],
    check: Check = check_model,
) -> None:
    """Raise what ``fetch`` would, as far as that shows without the network."""
    if source.kind == "hub":
        place, cache = (source.location, source.revision), server.hub_cache
        check = _check_of(source, check)
        check_hub(*place, cache, environ, offline=server.offline, check=check)
    elif source.kind == "s3":
        from lmi_core.config.artefacts.s3 import check_s3

        root = download_root(server, environ)
        check_s3(source.location, root, environ, offline=server.offline)
    elif source.kind == "local":
        check(model_directory(Path(source.location)))


def _check_of(source: ModelSource, check: Check) -> Check:
    """Of a hub's snapshot."""
    if not source.file:
        return check
    return lambda directory: check(model_directory(named_file(directory, source.file)))


def fetch_adapter(
    source: ModelSource, server: ServerConfig, *, environ: Mapping[str, str] | None = None
) -> Path:
    """As ``fetch``, of a LoRA adapter."""
    return _fetch(source, server, check_adapter, environ)


def _fetch(
    source: ModelSource,
    server: ServerConfig,
    check: Check,
    environ: Mapping[str, str] | None,
    progress: Progress | None = None,
    *,
    with_code: bool = False,
) -> Path:
    environ = os.environ if environ is None else environ
    if source.kind == "local":
        directory = Path(source.location)
    elif source.kind == "hub":
        directory = fetch_from_hub(
            source.location,
            source.revision,
            server.hub_cache,
            environ,
            offline=server.offline,
            with_code=with_code,
            check=_check_of(source, check),
            files=file_patterns(source.file) if source.file else (),
        )
        if source.file:
            directory = named_file(directory, source.file)
    elif source.kind == "s3":
        from lmi_core.config.artefacts.s3 import fetch_from_s3

        directory = fetch_from_s3(
            source.location,
            download_root(server, environ),
            environ,
            progress,
            offline=server.offline,
        )
    else:
        raise ModelError("the model has no files: set option.model_id", field="option.model_id")
    directory = model_directory(directory)
    check(directory)
    return directory
