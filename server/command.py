"""``lmi serve``: from a configuration to a running server."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Sequence
from pathlib import Path

from lmi_core.config.launch import Launch, prepare
from lmi_core.config.resolve import resolve
from lmi_core.config.server_config import ServerConfig
from lmi_core.engine.engine import Engine
from lmi_core.errors import ConfigError
from lmi_core.progress import TerminalProgress
from lmi_core.text.chat import ChatTemplate
from lmi_server.lifecycle import bind, run_server
from lmi_server.logging import setup_logging
from lmi_server.metrics import Metrics
from lmi_server.options import ServerOptions
from lmi_server.protocols.lmi import LmiOptions
from lmi_server.protocols.lmi_release import Release
from lmi_server.protocols.tgi_options import TgiOptions

log = logging.getLogger(__name__)


def serve(argv: Sequence[str], default_model: Path) -> int:
    """Serve what the arguments and the environment configure, until a signal; the exit code.

    A busy port is reported before anything is fetched.
    """
    deployment = resolve(argv, default_model=default_model)
    server = deployment.server
    setup_logging(server.log_format, server.log_level)
    for warning in deployment.warnings:
        log.warning(warning)
    bind(server.host, server.port).close()
    launch = prepare(deployment)
    options = build_options(launch)
    metrics = Metrics(options.model_name)
    progress = TerminalProgress()

    def announce(text: str) -> None:
        progress.finish()
        print(text, flush=True)

    engine = Engine(launch.engine, observer=metrics.engine, progress=progress)
    asyncio.run(run_server(engine, options, metrics, announce=announce))
    return 0


def build_options(launch: Launch) -> ServerOptions:
    """The server's configuration."""
    server, engine = launch.server, launch.engine
    stop = launch.model.get("option.stop_sequence")
    return ServerOptions(
        host=server.host,
        port=server.port,
        api=server.api,
        api_keys=() if server.api_key is None else (server.api_key,),
        cors_origins=server.cors_origins,
        cors_methods=server.cors_methods,
        cors_headers=server.cors_headers,
        request_id_header=server.request_id_header,
        tls=_tls(server),
        model_name=engine.served_model_name,
        max_request_bytes=server.max_request_size_bytes,
        max_in_flight=engine.max_queue_size + engine.max_num_seqs,
        receive_timeout_s=server.receive_timeout_s,
        drain_timeout_s=server.drain_timeout_s,
        log_format=server.log_format,
        lmi=LmiOptions(
            output_formatter=launch.model.output_formatter,
            tgi_compat=launch.model.tgi_compat,
            release=Release.parse(release) if (release := launch.model.lmi_compat) else None,
            samples=launch.model.get("option.decoding_strategy") == "sample",
            stop=stop if isinstance(stop, tuple) else (),
            statuses=server.statuses,
        ),
        tgi=_tgi_options(launch),
        chat_template=_chat_template(launch),
    )


def _tls(server: ServerConfig) -> ssl.SSLContext | None:
    """What speaks https with the configured certificate; None: http."""
    if server.certificate_file is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(server.certificate_file, server.private_key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"certificate_file={server.certificate_file} and "
            f"private_key_file={server.private_key_file} can't be used: {error}",
            field="certificate_file",
        ) from None
    return context


def _chat_template(launch: Launch) -> ChatTemplate | None:
    """The model's, unless the configuration names another; what is broken in it is logged."""
    named = launch.model.get("option.chat_template")
    config_path = launch.model.get("option.tokenizer_config_path")
    template = ChatTemplate.load(
        launch.engine.model,
        template=None if named is None else str(named),
        config_path=None if config_path is None else Path(str(config_path)),
    )
    for fault in [] if template is None else template.faults():
        log.warning("%s; chats are refused, everything else works", fault)
    return template


def _tgi_options(launch: Launch) -> TgiOptions:
    """The launcher's limits, or its defaults where another system's configuration has none."""
    engine, server, source = launch.engine, launch.server, launch.model.source
    names = ("max_best_of", "max_stop_sequences", "max_top_n_tokens", "max_client_batch_size")
    limits = {name: getattr(server, name) for name in names}
    return TgiOptions(
        version=3 if server.tgi_version == 3 else 2,
        max_concurrent_requests=engine.max_queue_size
        + (0 if server.api == "tgi" else engine.max_num_seqs),
        max_input_tokens=launch.model.max_input_tokens,
        enable_prefill_logprobs=server.enable_prefill_logprobs,
        disable_grammar_support=server.disable_grammar_support,
        compute_type=os.environ.get("COMPUTE_TYPE") or "cpu",
        model_id=source.location,
        model_sha=source.revision,
        **{name: limit for name, limit in limits.items() if limit is not None},
    )
