"""``lmi serve``: from a resolved configuration to a running server."""

from __future__ import annotations

import asyncio

from lmi_core.config.launch import Launch
from lmi_core.engine.engine import Engine
from lmi_core.progress import TerminalProgress
from lmi_core.text.chat import ChatTemplate
from lmi_server.lifecycle import run_server
from lmi_server.logging import setup_logging
from lmi_server.metrics import Metrics
from lmi_server.options import LogFormat, ServerOptions
from lmi_server.protocols.lmi import LmiOptions


def serve(launch: Launch, log_format: LogFormat, log_level: str, receive_timeout_s: float) -> int:
    """Serve until a signal; returns the exit code."""
    setup_logging(log_format, log_level)
    options = build_options(launch, log_format, receive_timeout_s)
    metrics = Metrics(options.model_name)
    progress = TerminalProgress()

    def announce(text: str) -> None:
        progress.finish()
        print(text, flush=True)

    engine = Engine(launch.engine, observer=metrics.engine, progress=progress)
    asyncio.run(run_server(engine, options, metrics, announce=announce))
    return 0


def build_options(
    launch: Launch, log_format: LogFormat = "console", receive_timeout_s: float = 30.0
) -> ServerOptions:
    """The server's options from a resolved configuration."""
    config, server = launch.engine, launch.server
    tgi_compat = launch.model.values.get("option.tgi_compat")
    return ServerOptions(
        host=server.host,
        port=server.port,
        api=server.api,
        api_keys=() if server.api_key is None else (server.api_key,),
        cors_origins=server.cors_origins,
        model_name=config.served_model_name,
        max_request_bytes=server.max_request_size_bytes,
        max_in_flight=config.max_queue_size + config.max_num_seqs,
        receive_timeout_s=receive_timeout_s,
        drain_timeout_s=server.drain_timeout_s,
        log_format=log_format,
        lmi=LmiOptions(
            output_formatter=launch.model.output_formatter,
            tgi_compat=tgi_compat is not None and tgi_compat.value is True,
        ),
        chat_template=ChatTemplate.load(config.model),
    )
