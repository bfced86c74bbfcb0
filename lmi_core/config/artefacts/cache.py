"""Where fetched models are kept, and what is there already."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lmi_core.config.artefacts.hub import hub_cache, snapshot_in_cache
from lmi_core.config.artefacts.model_source import ModelSource
from lmi_core.config.artefacts.s3_url import config_directory, target_of
from lmi_core.config.paths import is_dir
from lmi_core.config.problem import Problems
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.errors import ModelError
from lmi_core.files import user_cache
from lmi_core.weights.gguf.directory import model_directory, named_file


def cached_directory(
    source: ModelSource, server: ServerConfig, environ: Mapping[str, str]
) -> Path | None:
    """Return the directory of a model that is here without the network, whole or not.

    Raises ModelError for a GGUF file that can't be read.
    """
    if source.kind == "local":
        return model_directory(Path(source.location))
    if source.kind == "hub":
        cache = server.hub_cache or hub_cache(environ)
        snapshot = snapshot_in_cache(source.location, source.revision, cache)
        if snapshot is None or not source.file:
            return snapshot
        with suppress(ModelError):  # it isn't here yet
            return model_directory(named_file(snapshot, source.file))
        return None
    if source.kind == "s3":
        try:
            root = download_root(server, environ)
            targets = target_of(source.location, root), config_directory(source.location, root)
        except ModelError:
            return None
        return next((target for target in targets if is_dir(target)), None)
    return None


def noted_directory(
    source: ModelSource, server: ServerConfig, environ: Mapping[str, str], problems: Problems
) -> Path | None:
    """As ``cached_directory``; what can't be read is a problem."""
    try:
        return cached_directory(source, server, environ)
    except ModelError as error:
        problems.error(source.location, str(error))
        return None


def readable_directory(
    source: ModelSource, server: ServerConfig, environ: Mapping[str, str]
) -> Path | None:
    """As ``cached_directory``; None also for what can't be read, which another check says."""
    with suppress(ModelError):
        return cached_directory(source, server, environ)
    return None


def download_root(server: ServerConfig, environ: Mapping[str, str]) -> Path:
    """Return where downloads are kept: SERVING_DOWNLOAD_DIR, DJL_CACHE_DIR, or a user's cache."""
    if server.download_dir is not None:
        return server.download_dir
    if environ.get("DJL_CACHE_DIR"):
        return Path(environ["DJL_CACHE_DIR"])
    return user_cache(environ) / "lmi"
