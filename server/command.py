"""``lmi serve``: from parsed arguments to a running server."""

from __future__ import annotations

import argparse
import asyncio

from lmi_core.config.engine_config import EngineConfig
from lmi_core.engine.engine import Engine
from lmi_core.progress import TerminalProgress
from lmi_core.text.chat import ChatTemplate
from lmi_server.lifecycle import run_server
from lmi_server.logging import setup_logging
from lmi_server.metrics import Metrics
from lmi_server.options import ServerOptions
from lmi_server.protocols.lmi import LmiOptions


def serve(args: argparse.Namespace, config: EngineConfig) -> int:
    """Serve until a signal; returns the exit code."""
    setup_logging(args.log_format, args.log_level)
    options = build_options(args, config)
    metrics = Metrics(options.model_name)
    progress = TerminalProgress()

    def announce(text: str) -> None:
        progress.finish()
        print(text, flush=True)

    engine = Engine(config, observer=metrics.engine, progress=progress)
    asyncio.run(run_server(engine, options, metrics, announce=announce))
    return 0


def build_options(args: argparse.Namespace, config: EngineConfig) -> ServerOptions:
    """The server's configuration from parsed arguments."""
    return ServerOptions(
        host=args.host,
        port=args.port,
        model_name=config.served_model_name,
        max_request_bytes=args.max_request_size,
        max_in_flight=config.max_queue_size + config.max_num_seqs,
        receive_timeout_s=args.request_timeout,
        drain_timeout_s=args.drain_timeout,
        lmi=LmiOptions(output_formatter=args.output_formatter, tgi_compat=args.tgi_compat),
        chat_template=ChatTemplate.load(config.model),
    )
