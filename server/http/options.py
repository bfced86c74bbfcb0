"""Configuration of the HTTP server."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lmi_core.settings.batch_config import BatchConfig
from lmi_core.settings.record_config import RecordConfig
from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.lmi.options import LmiOptions
from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.http.answer_deadline import AnswerLimits
from lmi_server.http.tenants import NO_LIMITS, TenantLimits

LogFormat = Literal["console", "json"]


class Listening(NamedTuple):
    """An address and what speaks https there; None: http."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What a server is told at its start; the model's own part is the engine's."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0: any free port; the one chosen is printed."""
    management: Listening | None = None
    """Where the management routes are, and nothing else is; None: with the others."""
    api: str = "lmi"
    """The dialect that shared routes speak: lmi, tgi or openai."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Any of them opens every route, and each is a tenant; empty: no key is needed."""
    tenant_limits: TenantLimits = NO_LIMITS
    shares_prefix_cache: bool = False
    """Tenants share cached prefixes with each other."""
    cors_origins: tuple[str, ...] = ()
    """Origins that browsers may call from, ``*`` for all; empty: no CORS headers."""
    cors_methods: str | None = None
    cors_headers: str | None = None
    """What a preflight is told is allowed; None: the usual methods, the headers it asked for."""
    request_id_header: str = "x-request-id"
    error_rates: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Failures and the seconds in which more make the server unhealthy, by kind."""
    tls: ssl.SSLContext | None = None
    """None: http."""
    admin_key: str | None = field(default=None, repr=False)
    """Opens the management routes; None: they are for the loopback interface only."""
    open_management: bool = False
    """Without an admin_key, management routes are for other machines too."""
    wait_for_models: bool = True
    """Listen only once the models of the start are loaded."""
    allow_multi_status: bool = False
    """Whether /ping answers 207 while models load, or 200."""
    model_name: str = "model"
    model_version: str | None = None
    max_request_bytes: int = 64 * 1024 * 1024
    """Longest body (max_request_size)."""
    response_store_bytes: int = 64 * 1024 * 1024
    """Of stored responses, the newest that fit (response_store_size); 0: none are stored."""
    max_in_flight: int = 1032
    """Requests inside the server at once; one more is refused with 503."""
    receive_timeout_s: float = 30.0
    """A connection must deliver its headers, and then its body, within this time."""
    record: RecordConfig | None = None
    """Which requests and answers are kept, and where; None: none."""
    batch: BatchConfig | None = None
    """Where the Batch API's files are; None: there is none."""
    otlp_endpoint: str | None = None
    """The collector that spans of calls go to; None: there are none."""
    otlp_service_name: str = "lmi"
    limits: AnswerLimits = field(default_factory=AnswerLimits)
    """How long an answer may say nothing (chunked_read_timeout, predict_timeout)."""
    send_timeout_s: float = 60.0
    """A client that reads nothing for this long is disconnected."""
    keepalive_timeout_s: float = 75.0
    drain_timeout_s: float = 30.0
    """How long a stopping server lets running requests finish."""
    log_format: LogFormat = "console"
    ui: bool = False
    """Serve the page for people at /ui."""
    ui_report: Mapping[str, object] = field(default_factory=dict, repr=False)
    """The configuration's explanation, which the page shows."""
    verbose: bool = False
    """Print every route once the server listens."""
    strict_requests: bool = False
    """Answer 422 to requests with fields that nobody here knows, instead of ignoring them."""
    lmi: LmiOptions = field(default_factory=LmiOptions)
    tgi: TgiOptions = field(default_factory=TgiOptions)
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """What requests on OpenAI's routes that leave these fields open get."""
    chat_template: ChatTemplate | None = None
    """The model's; None: chat bodies are refused."""
    has_lora: bool = False
    """Whether the model's engine holds adapters, which requests may name."""
