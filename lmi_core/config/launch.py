"""From a resolved configuration to what a server is started with: fetched and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lmi_core.config.artefacts.fetch import fetch
from lmi_core.config.engine_config import EngineConfig
from lmi_core.config.model_config import ModelConfig
from lmi_core.config.resolve import Deployment
from lmi_core.config.server_config import ServerConfig
from lmi_core.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One model on the native engine: its configuration, the engine's and the server's."""

    model: ModelConfig
    engine: EngineConfig
    server: ServerConfig


def prepare(deployment: Deployment, environ: Mapping[str, str] | None = None) -> Launch:
    """Fetch a deployment's model and return what starts it; blocking.

    Raises ModelError if the files can't be had, and UserError if no model is configured.
    """
    if not deployment.models:
        raise UserError("no model is configured (load_models=NONE)", field="load_models")
    (model,) = deployment.models
    environ = os.environ if environ is None else environ
    directory = fetch(model.source, deployment.server, environ=environ)
    return Launch(model=model, engine=model.engine_config(directory), server=deployment.server)
