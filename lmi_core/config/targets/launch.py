"""From a resolved configuration to what a server is started with: fetched and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmi_core.config.artefacts.cache import download_root, readable_directory
from lmi_core.config.artefacts.fetch import fetch, fetch_adapter, fetch_config
from lmi_core.config.artefacts.requirements import install_requirements
from lmi_core.config.artefacts.s3 import fetch_from_s3
from lmi_core.config.judge import judge
from lmi_core.config.model_config import ModelConfig
from lmi_core.config.problem import Problems
from lmi_core.config.resolve import Deployment
from lmi_core.config.secure_mode import check_files
from lmi_core.config.targets.library_settings import is_library
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.settings.custom_code_config import CustomCodeConfig
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.library_config import LibraryConfig

if TYPE_CHECKING:
    from lmi_core.models.found_model import FoundModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One model on our engine or another library's: its configuration, the engine's and the
    server's."""

    model: ModelConfig
    engine: EngineConfig | LibraryConfig
    server: ServerConfig
    found: FoundModel | None = None
    """What was read of the model's files to judge it, for our engine to load; None: it reads
    them."""
    formatter: CustomCodeConfig | None = None
    """The model's own code, where it formats requests or answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomCodeLaunch:
    """One model that answers by code of its own."""

    model: ModelConfig
    handler: CustomCodeConfig
    server: ServerConfig


def prepare(
    deployment: Deployment, environ: Mapping[str, str] | None = None
) -> tuple[Launch | CustomCodeLaunch, ...]:
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
) -> Launch | CustomCodeLaunch:
    """Fetch one model and its adapters, and install what its code needs; blocking.

    ``num_models``, with it, are loaded together and share memory. Raises ModelError if the files
    can't be had.
    """
    environ = os.environ if environ is None else environ
    model = _known(model, server, environ)
    found = _judged(model, server, environ)
    code = _code(model, server, environ)
    if model.backend == "handler":
        assert code is not None, "a handler has a configuration"
        return CustomCodeLaunch(model=model, handler=code, server=server)
    with_code = model.trust_remote_code and model.backend != "lmi"
    if found is not None and model.source.kind == "local":
        directory = found.asked.model
    else:
        directory = fetch(model.source, server, environ=environ, with_code=with_code)
    if model.source.kind != "local":
        if not model.files.known and model.again is not None:
            model = model.again()
        found = _judged(model, server, environ)
    engine: EngineConfig | LibraryConfig
    named = () if model.lora is None else model.lora.named
    adapters = [(a.name, fetch_adapter(a.source, server, environ=environ)) for a in named]
    check_files((path for _, path in adapters), environ)
    if is_library(model.backend):
        engine = model.library_config(directory, adapters)
    else:
        draft = None
        if model.draft is not None:
            draft = fetch(model.draft.source, server, environ=environ)
            if model.draft.source.kind != "local":
                found = _judged(model, server, environ)
        engine = model.engine_config(directory, adapters, draft)
        if found is not None and found.asked != engine:
            found = None  # an adapter was fetched meanwhile
        engine = replace(engine, num_models=num_models)
        found = found and replace(found, asked=engine)
    return Launch(model=model, engine=engine, server=server, found=found, formatter=code)


def _known(model: ModelConfig, server: ServerConfig, environ: Mapping[str, str]) -> ModelConfig:
    """The model as its config.json decides it, which is fetched for that if it isn't here."""
    if model.files.known or model.again is None or model.source.kind not in ("hub", "s3"):
        return model
    fetch_config(model.source, server, environ)
    if readable_directory(model.source, server, environ) is None:
        return model
    again = model.again()
    if again.source == model.source:
        return again
    return _known(again, server, environ)  # the base of what was an adapter alone


def _judged(
    model: ModelConfig, server: ServerConfig, environ: Mapping[str, str]
) -> FoundModel | None:
    """What was found of the model; ConfigError with everything that speaks against it."""
    verdict = judge(model, server, environ)
    Problems(list(verdict.problems)).raise_errors()
    return verdict.found


def _code(
    model: ModelConfig, server: ServerConfig, environ: Mapping[str, str]
) -> CustomCodeConfig | None:
    """The configuration of a model's own code, its requirements installed.

    A handler reads its files itself, and gets those from S3 as a directory.
    """
    config = model.custom_code_config()
    if config is None:
        return None
    root = download_root(server, environ)
    packages = install_requirements(
        config.model_dir,
        root,
        offline=server.offline,
        python=config.python,
        env=config.environment(environ),
    )
    source, model_id = model.source, None
    if source.kind == "local" and "option.model_id" in model.values:
        model_id = os.path.abspath(source.location)
    elif source.kind == "s3" and config.function is not None:
        fetched = fetch_from_s3(source.location, root, environ, None, offline=server.offline)
        model_id = str(fetched)
    return model.custom_code_config(packages=packages, model_id=model_id)
