"""``lmi serve``: from a configuration to a running server."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lmi_core.config.explain import as_json
from lmi_core.config.resolve import examine, resolve
from lmi_core.progress import TerminalProgress
from lmi_server.http.lifecycle import bind_all, run_server
from lmi_server.http.logging import setup_logging
from lmi_server.http.metrics import Metrics
from lmi_server.http.tenants import keep_salts
from lmi_server.http.turns import new_event_loop
from lmi_server.models.loading import recipe_of, server_options
from lmi_server.models.model_registry import ModelRegistry
from lmi_server.models.registration import ConfiguredRegistrar

log = logging.getLogger(__name__)


def serve(argv: Sequence[str], default_model: Path) -> int:
    """Serve what the arguments and the environment configure, until a signal; the exit code.

    A busy port is reported before anything is fetched.
    """
    deployment = resolve(argv, default_model=default_model)
    server = deployment.server
    options = server_options(server)
    setup_logging(options.log_format, server.log_level)
    for warning in deployment.warnings:
        log.warning(warning)
    if options.ui:
        report = as_json(examine(argv, default_model=default_model))
        options = replace(options, ui_report=report)
    with bind_all(options):
        pass
    progress = TerminalProgress()

    def announce(text: str) -> None:
        progress.finish()
        print(text, flush=True)

    for model in deployment.models:
        if isinstance(directory := model.get("option.prefix_cache_dir"), str):
            keep_salts(Path(directory))
            break
    num_models = len(deployment.models)
    models = ModelRegistry(
        options,
        Metrics(server.metric_aliases),
        [
            recipe_of(model, server, num_models=num_models, progress=progress)
            for model in deployment.models
        ],
        registrar=ConfiguredRegistrar(argv, os.environ, server),
    )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run_server(models, announce=announce))
    return 0
