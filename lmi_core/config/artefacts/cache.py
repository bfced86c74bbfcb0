"""Where fetched models are kept, and what is there already."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lmi_core.config.artefacts.hub import hub_cache, snapshot_in_cache
from lmi_core.config.artefacts.model_source import ModelSource
from lmi_core.config.artefacts.s3_url import config_directory, target_of
from lmi_core.config.paths import is_dir
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.errors import ModelError


def cached_directory(
    source: ModelSource, server: ServerConfig, environ: Mapping[str, str]
) -> Path | None:
    """Return the directory of a model that is here without the network, whole or not."""
    if source.kind == "local":
        return Path(source.location)
    if source.kind == "hub":
        cache = server.hub_cache or hub_cache(environ)
        return snapshot_in_cache(source.location, source.revision, cache)
    if source.kind == "s3":
        try:
            root = download_root(server, environ)
            targets = target_of(source.location, root), config_directory(source.location, root)
        except ModelError:
            return None
        return next((target for target in targets if is_dir(target)), None)
    return None


def download_root(server: ServerConfig, environ: Mapping[str, str]) -> Path:
    """Return where downloads are kept: SERVING_DOWNLOAD_DIR, DJL_CACHE_DIR, or a user's cache."""
    if server.download_dir is not None:
        return server.download_dir
    if environ.get("DJL_CACHE_DIR"):
        return Path(environ["DJL_CACHE_DIR"])
    cache = environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lmi"
