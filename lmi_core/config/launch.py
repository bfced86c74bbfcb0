"""From a resolved configuration to what a server is started with: fetched and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lmi_core.config.artefacts.fetch import fetch
from lmi_core.config.engine_config import EngineConfig
from lmi_core.config.model_config import ModelConfig
from lmi_core.config.resolve import Deployment
from lmi_core.config.server_config import ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One model on the native engine: its configuration, the engine's and the server's."""

    model: ModelConfig
    engine: EngineConfig
    server: ServerConfig


def prepare(deployment: Deployment, environ: Mapping[str, str] | None = None) -> tuple[Launch, ...]:
    """Fetch a deployment's models and return what starts each; blocking.

    Raises ModelError if the files can't be had.
    """
    num_models = len(deployment.models)
    return tuple(
        prepare_model(model, deployment.server, environ, num_models=num_models)
        for model in deployment.models
    )


def prepare_model(
    model: ModelConfig,
    server: ServerConfig,
    environ: Mapping[str, str] | None = None,
    *,
    num_models: int = 1,
) -> Launch:
    """Fetch one model; ``num_models``, with it, are loaded together and share memory. Blocking.

    Raises ModelError if the files can't be had.
    """
    environ = os.environ if environ is None else environ
    directory = fetch(model.source, server, environ=environ)
    engine = replace(model.engine_config(directory), num_models=num_models)
    return Launch(model=model, engine=engine, server=server)
