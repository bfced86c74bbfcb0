"""From a model's configuration to the recipe by which the server loads it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lmi_core.backends.open_backend import open_backend
from lmi_core.config.judge import ONLY_CHATS
from lmi_core.config.model_config import ModelConfig
from lmi_core.config.table import BY_KEY
from lmi_core.config.table.capabilities import BACKENDS
from lmi_core.config.targets.launch import CustomCodeLaunch, Launch, prepare_model
from lmi_core.config.targets.sampling_defaults import sampling_defaults
from lmi_core.config.targets.server_config import ServerConfig
from lmi_core.copies.copies import Copies
from lmi_core.copies.machines import Devices, Machines, ThisMachine
from lmi_core.copies.on_ray import RayMachines
from lmi_core.engine.engine import Engine
from lmi_core.engine.stats import EngineObserver
from lmi_core.settings.custom_code_config import CustomCodeConfig
from lmi_core.settings.library_config import LibraryConfig
from lmi_core.text.chat import ChatTemplate
from lmi_core.tools.forms import form_named
from lmi_core.tools.reasoning import REASONING
from lmi_server.dialects.lmi.formatting import FormattingBackend
from lmi_server.dialects.lmi.options import LmiOptions
from lmi_server.dialects.lmi.release import Release
from lmi_server.dialects.lmi.session_store import SessionOptions
from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.http.answer_deadline import AnswerLimits
from lmi_server.http.options import Listening, ServerOptions
from lmi_server.http.tenants import TenantLimits
from lmi_server.models.custom_code_backend import CustomCodeBackend
from lmi_server.models.model import Opened, Recipe

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]


def recipe_of(
    model: ModelConfig,
    server: ServerConfig,
    environ: Mapping[str, str] | None = None,
    *,
    name: str | None = None,
    num_models: int = 1,
    progress: Progress | None = None,
) -> Recipe:
    """``name`` beats the configured one; ``num_models``, with it, are loaded together."""
    if name is not None and name != model.name:
        model = replace(model, name=name)
    code = model.custom_code_config() if model.backend == "handler" else None
    num_copies, most_copies = model.num_processes, model.placement.most_copies

    return Recipe(
        name=model.name,
        version=model.version,
        open=partial(_open, model, server, environ, num_models, progress),
        url=_url(model),
        engine=BACKENDS[model.backend].title,
        queue_size=_number(model, "job_queue_size"),
        batch_size=_number(model, "batch_size"),
        max_batch_delay_ms=_number(model, "max_batch_delay"),
        max_idle_s=_number(model, "max_idle_time"),
        min_workers=num_copies or 1 if code is None else code.min_workers,
        max_workers=most_copies if code is None else code.max_workers,
        has_processes=code is not None or num_copies is not None,
        has_code=code is not None,
        loading_timeout_s=None if code is not None else _loading_timeout(model),
    )


async def _open(
    model: ModelConfig,
    server: ServerConfig,
    environ: Mapping[str, str] | None,
    num_models: int,
    progress: Progress | None,
    observer: EngineObserver,
) -> Opened:
    launch = await asyncio.to_thread(prepare_model, model, server, environ, num_models=num_models)
    options = await asyncio.to_thread(build_options, launch)
    if isinstance(launch, CustomCodeLaunch):
        return Opened(options, CustomCodeBackend(launch.handler))
    if isinstance(launch.engine, LibraryConfig):
        return Opened(options, open_backend(launch.engine, observer))
    if model.num_processes is not None:
        copies = Copies(
            launch.engine,
            model.num_processes,
            model.placement.most_copies,
            idle_s=_number(model, "max_idle_time"),
            observer=observer,
            progress=progress,
            machines=await _machines(model),
        )
        return Opened(options, copies)
    engine = Engine(launch.found or launch.engine, observer=observer, progress=progress)
    if launch.formatter is not None:
        return Opened(options, FormattingBackend(engine, launch.formatter))
    return Opened(options, engine)


async def _machines(model: ModelConfig) -> Machines:
    """Where its copies run."""
    placement = model.placement
    if placement.device_ids:
        return Devices([placement.environment(i) for i in range(placement.num_copies)])
    if placement.device == "torch-cpu":
        return Devices([{}])
    if not model.is_on_ray:
        return ThisMachine()
    address = str(model.get("option.ray_address") or BY_KEY["option.ray_address"].default)
    return await asyncio.to_thread(RayMachines, address)


def _loading_timeout(model: ModelConfig) -> float | None:
    seconds = model.get("option.model_loading_timeout")
    return float(seconds) if isinstance(seconds, int) else None


def server_options(server: ServerConfig) -> ServerOptions:
    """The options of the server as a whole."""
    tls, management = server.tls_context(), server.management
    return ServerOptions(
        host=server.host,
        port=server.port,
        api=server.api,
        api_keys=server.api_keys,
        tenant_limits=TenantLimits(
            max_requests=server.max_tenant_requests,
            tokens_per_minute=server.max_tenant_tokens_per_minute,
        ),
        shares_prefix_cache=server.share_prefix_cache,
        cors_origins=server.cors_origins,
        cors_methods=server.cors_methods,
        cors_headers=server.cors_headers,
        request_id_header=server.request_id_header,
        error_rates=server.error_rates,
        tls=tls if server.scheme == "https" else None,
        management=None
        if management is None
        else Listening(
            management.host, management.port, tls if management.scheme == "https" else None
        ),
        admin_key=server.admin_key,
        open_management=server.open_management,
        wait_for_models=server.wait_model_loading,
        allow_multi_status=server.allow_multi_status,
        max_request_bytes=server.max_request_size_bytes,
        response_store_bytes=server.response_store_bytes,
        record=server.record,
        batch=server.batch,
        otlp_endpoint=server.otlp_endpoint,
        otlp_service_name=server.otlp_service_name,
        receive_timeout_s=server.receive_timeout_s,
        drain_timeout_s=server.drain_timeout_s,
        log_format=server.log_format,
        strict_requests=server.strict_requests,
        verbose=server.verbose,
        ui=server.ui,
        lmi=LmiOptions(statuses=server.statuses),
    )


def build_options(launch: Launch | CustomCodeLaunch) -> ServerOptions:
    """The server's options with one model's own part."""
    model = launch.model
    if isinstance(launch, CustomCodeLaunch):
        return replace(
            server_options(launch.server),
            model_name=model.name,
            model_version=model.version,
            max_in_flight=_capacity(launch.handler),
            lmi=LmiOptions(statuses=launch.server.statuses),
        )
    engine = launch.engine
    stop = model.get("option.stop_sequence")
    return replace(
        server_options(launch.server),
        model_name=model.name,
        model_version=model.version,
        max_in_flight=engine.max_queue_size + engine.max_num_seqs,
        limits=_limits(launch),
        lmi=LmiOptions(
            output_formatter=model.output_formatter,
            tgi_compat=model.tgi_compat,
            pipeline=_pipeline(model),
            release=Release.parse(release) if (release := model.lmi_compat) else None,
            strategy=str(model.get("option.decoding_strategy") or ""),
            stop=stop if isinstance(stop, tuple) else (),
            sessions=_sessions(model),
            statuses=launch.server.statuses,
            **_watermark(model),
            custom_formatter=launch.formatter is not None
            and launch.formatter.output_formatter is not None,
        ),
        tgi=_tgi_options(launch),
        sampling_defaults=sampling_defaults(model, engine.model),
        chat_template=_chat_template(launch),
        has_lora=engine.lora is not None,
    )


def _sessions(model: ModelConfig) -> SessionOptions | None:
    if model.get("option.enable_stateful_sessions") is not True:
        return None
    path, seconds = (
        model.get(f"option.sessions_{name}") or BY_KEY[f"option.sessions_{name}"].default
        for name in ("path", "expiration")
    )
    return SessionOptions(directory=Path(str(path)), lifetime_s=int(str(seconds)))


def _limits(launch: Launch) -> AnswerLimits:
    """Between pieces both count; before the first one a request may be waiting for its step."""
    read_s = launch.server.values.get("chunked_read_timeout")
    given = [s for s in (read_s, launch.model.get("option.predict_timeout")) if isinstance(s, int)]
    return AnswerLimits(
        first_s=float(read_s) if isinstance(read_s, int) else None,
        next_s=float(min(given)) if given else None,
    )


def _chat_template(launch: Launch) -> ChatTemplate | None:
    """The model's, unless the configuration names another; what is broken in it is logged."""
    files = launch.engine.model
    config_path = launch.model.file("option.tokenizer_config_path", files)
    parser, reasoning = (
        launch.model.get(f"option.{name}") for name in ("tool_call_parser", "reasoning_parser")
    )
    if reasoning is None and launch.model.get("option.enable_reasoning") is False:
        reasoning = "none"
    template = ChatTemplate.load(
        files,
        template=launch.model.file("option.chat_template", files),
        config_path=None if config_path is None else Path(config_path),
        tool_form=None if parser is None else form_named(str(parser)),
        auto_tools=launch.model.get("option.enable_auto_tool_choice") is not False,
        reasoning="none" if reasoning == "none" else REASONING.get(str(reasoning)),
    )
    for fault in [] if template is None else template.faults():
        log.warning("%s; %s", fault, ONLY_CHATS)
    return template


def _pipeline(model: ModelConfig) -> Literal["", "answers", "lines", "lines with prompt"]:
    """How LMI answers where option.rolling_batch=disable, but for its async_mode."""
    if model.get("option.rolling_batch") != "disable" or model.get("option.async_mode") is True:
        return ""
    if model.system != "accelerate":
        return ""
    match model.get("option.enable_streaming"):
        case "true":
            return "lines"
        case "huggingface":
            return "lines with prompt"
        case _:
            return "answers"


def _capacity(handler: CustomCodeConfig) -> int:
    """Requests that wait or are worked on."""
    return handler.max_queue_size + handler.max_workers * handler.batch_size


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
        ignores_watermark=server.ignore_watermark,
        **_watermark(launch.model),
        compute_type=server.compute_type,
        model_id=source.location,
        model_sha=source.revision,
        **{name: limit for name, limit in limits.items() if limit is not None},
    )


def _watermark(model: ModelConfig) -> dict[str, Any]:
    """The share of favoured tokens and what is added to them, as far as they are configured."""
    values = {name: model.get(f"option.{name}") for name in ("watermark_gamma", "watermark_delta")}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def _url(model: ModelConfig) -> str:
    """Where the model was found, as a URL; a directory's ends with a slash."""
    if model.archive_url is not None:
        return model.archive_url
    if model.directory is not None:
        return Path(os.path.abspath(model.directory)).as_uri() + "/"
    if model.source.kind == "local":
        return Path(os.path.abspath(model.source.location)).as_uri() + "/"
    return model.source.location


def _number(model: ModelConfig, key: str) -> int:
    value = model.values.get(key)
    number = BY_KEY[key].default_for(model.system) if value is None else value.value
    return number if isinstance(number, int) else 0
