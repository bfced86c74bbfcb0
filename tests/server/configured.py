"""What ``lmi serve`` makes of configuration keys, for tests that go from a key to the behaviour."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from lmi_core.config.resolve import Deployment, resolve
from lmi_core.config.targets.launch import prepare
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.demo import MODEL_DIR
from lmi_server.http.options import ServerOptions
from lmi_server.models.loading import build_options
from tests.config.cases import CPU, NO_CACHE


def deployment_of(*settings: str, environ: dict[str, str] | None = None) -> Deployment:
    """Of the embedded model and lines of properties."""
    options = itertools.chain.from_iterable(("--option", setting) for setting in settings)
    argv = (str(MODEL_DIR), *options)
    return resolve(argv, {**NO_CACHE, **(environ or {})}, CPU)


def server_of(*settings: str, environ: dict[str, str] | None = None) -> ServerConfig:
    return deployment_of(*settings, environ=environ).server


def options_of(*settings: str, environ: dict[str, str] | None = None) -> ServerOptions:
    (launch,) = prepare(deployment_of(*settings, environ=environ), NO_CACHE)
    return build_options(launch)


def configured(*settings: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """The fields of ``ServerOptions`` that the keys change, for a harness's server."""
    usual, chosen = options_of(), options_of(*settings, environ=environ)
    names = {field.name for field in dataclasses.fields(ServerOptions)} - {"chat_template"}
    return {n: getattr(chosen, n) for n in names if getattr(chosen, n) != getattr(usual, n)}
