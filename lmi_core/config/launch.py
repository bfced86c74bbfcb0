"""From a command line to what a server is started with: resolved, fetched, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmi_core.config.artefacts.fetch import fetch
from lmi_core.config.engine_config import EngineConfig
from lmi_core.config.host import Host
from lmi_core.config.model_config import ModelConfig
from lmi_core.config.resolve import resolve
from lmi_core.config.server_config import ServerConfig
from lmi_core.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One model on the native engine: its configuration, the engine's and the server's."""

    model: ModelConfig
    engine: EngineConfig
    server: ServerConfig
    warnings: tuple[str, ...]


def prepare(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    host: Host | None = None,
    *,
    default_model: Path | None = None,
) -> Launch:
    """Resolve a configuration, fetch its model and return what starts it; blocking.

    Raises ConfigError with all faults, ModelError if the files can't be had, and UserError if more
    than one model is configured.
    """
    environ = os.environ if environ is None else environ
    deployment = resolve(argv, environ, host, default_model=default_model)
    if len(deployment.models) != 1:
        names = ", ".join(model.name for model in deployment.models) or "none"
        raise UserError(f"this version serves one model per process, configured are: {names}")
    (model,) = deployment.models
    directory = fetch(model.source, deployment.server, environ=environ)
    return Launch(
        model=model,
        engine=model.engine_config(directory),
        server=deployment.server,
        warnings=deployment.warnings,
    )
