"""The frozen configuration of the server as a whole."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from lmi_core.config.address import Address, is_loopback, parse_address
from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.config.sources.origin import Precedence
from lmi_core.config.table import BY_KEY
from lmi_core.errors import ConfigError
from lmi_core.settings.batch_config import BatchConfig
from lmi_core.settings.record_config import RecordConfig

if TYPE_CHECKING:
    import ssl

_HEADER = re.compile(r"[\w!#$%&'*+.^`|~-]{1,80}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Address, limits and directories of the server; ``values`` holds every server key given."""

    scheme: str = "http"
    host: str = "127.0.0.1"
    port: int = 8080
    management: Address | None = None
    """Where the management routes are, and nothing else is; None: with the others."""
    api: str = "lmi"
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_tenant_requests: int | None = None
    max_tenant_tokens_per_minute: int | None = None
    share_prefix_cache: bool = False
    cors_origins: tuple[str, ...] = ()
    cors_methods: str | None = None
    cors_headers: str | None = None
    request_id_header: str = "x-request-id"
    certificate_file: Path | None = None
    """With ``private_key_file``: for addresses of https. Both are PEM."""
    private_key_file: Path | None = None
    error_rates: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Failures and the seconds in which more of them make /ping answer 503, by kind."""
    statuses: Mapping[str, int] = field(default_factory=dict)
    """HTTP statuses of LMI's failures by the option that sets them, where they are set."""
    max_request_size_bytes: int = 64 << 20
    response_store_bytes: int = 64 << 20
    record: RecordConfig | None = None
    """None: no receipts are kept."""
    batch: BatchConfig | None = None
    """None: there is no Batch API."""
    otlp_endpoint: str | None = None
    otlp_service_name: str = "lmi"
    max_archive_bytes: int = 64 << 30
    receive_timeout_s: float = 30.0
    drain_timeout_s: int = 30
    log_format: Literal["console", "json"] = "console"
    log_level: str = "info"
    verbose: bool = False
    ui: bool = False
    strict_requests: bool = False
    metric_aliases: tuple[str, ...] = ()
    """Systems whose names the metrics have, too."""
    download_dir: Path | None = None
    hub_cache: Path | None = None
    offline: bool = False
    tgi_version: int = 2
    enable_prefill_logprobs: bool = False
    disable_grammar_support: bool = False
    ignore_watermark: bool = False
    compute_type: str = "cpu"
    max_best_of: int | None = None
    max_stop_sequences: int | None = None
    max_top_n_tokens: int | None = None
    max_client_batch_size: int | None = None
    admin_key: str | None = field(default=None, repr=False)
    open_management: bool = False
    allow_custom_code: bool = False
    model_store: Path | None = None
    model_url_pattern: str | None = None
    wait_model_loading: bool = True
    allow_multi_status: bool = False
    values: Mapping[str, object]

    def tls_context(self) -> ssl.SSLContext | None:
        """What speaks https with the configured certificate; None: http. ConfigError for files that
        can't be used."""
        if self.certificate_file is None:
            return None
        import ssl

        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.certificate_file, self.private_key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"certificate_file={self.certificate_file} and "
                f"private_key_file={self.private_key_file} can't be used: {error}",
                field="certificate_file",
            ) from None
        return context


def server_config(server: Values, problems: Problems, *, tgi: bool) -> ServerConfig:
    """Build the server's configuration; ``server`` holds the launcher's flags and variables."""
    inference = _inference(server, problems, tgi)
    management = _management(server, problems, inference)
    certificate, private_key = _certificate(server, problems, inference, management)
    limit = server.get("option.payload_limit") or server.get("max_request_size")
    archive = server.get("max_archive_size")
    drain = server.get("option.graceful_termination_timeout")
    timeout, stored = server.get("request_timeout"), server.get("response_store_size")
    return ServerConfig(
        scheme=inference.scheme,
        host=inference.host,
        port=inference.port,
        management=management,
        api=_api(server, tgi),
        api_keys=_keys(server),
        max_tenant_requests=_number(server, "max_tenant_requests"),
        max_tenant_tokens_per_minute=_number(server, "max_tenant_tokens_per_minute"),
        share_prefix_cache=server.get("share_prefix_cache") is True,
        cors_origins=_origins(server),
        cors_methods=_text(server.get("cors_allowed_methods")),
        cors_headers=_text(server.get("cors_allowed_headers")),
        request_id_header=_header(server, problems),
        certificate_file=certificate,
        private_key_file=private_key,
        statuses=_statuses(server),
        error_rates=_error_rates(server),
        max_request_size_bytes=limit if isinstance(limit, int) else 64 << 20,
        response_store_bytes=stored if isinstance(stored, int) else 64 << 20,
        record=_record(server),
        batch=_batch(server),
        otlp_endpoint=_text(server.get("option.otlp_endpoint")),
        otlp_service_name=_text(server.get("option.otlp_service_name")) or "lmi",
        max_archive_bytes=archive if isinstance(archive, int) else 64 << 30,
        receive_timeout_s=timeout if isinstance(timeout, float) else 30.0,
        drain_timeout_s=drain if isinstance(drain, int) else 90 if tgi else 30,
        log_format="json" if _logs_json(server) else "console",
        verbose=server.get("verbose") is True,
        ui=server.get("ui") is True,
        strict_requests=server.get("strict_requests") is True,
        metric_aliases=_names(server.get("metric_aliases")),
        log_level=str(server.get("log_level") or "info"),
        download_dir=_path(server.get("download_dir")),
        hub_cache=_path(server.get("option.huggingface_hub_cache")),
        offline=server.get("offline") is True,
        tgi_version=3 if server.get("tgi_version") == "3" else 2,
        enable_prefill_logprobs=server.get("option.enable_prefill_logprobs") is True,
        disable_grammar_support=server.get("option.disable_grammar_support") is True,
        ignore_watermark=server.get("ignore_watermark") is True,
        compute_type=str(server.get("option.compute_type") or "cpu"),
        max_best_of=_limit(server, "max_best_of", tgi),
        max_stop_sequences=_limit(server, "max_stop_sequences", tgi),
        max_top_n_tokens=_limit(server, "max_top_n_tokens", tgi),
        max_client_batch_size=_limit(server, "max_client_batch_size", tgi),
        admin_key=_text(server.get("admin_key")),
        open_management=server.get("open_management") is True,
        allow_custom_code=server.get("allow_custom_code") is True,
        model_store=_path(server.get("model_store")),
        model_url_pattern=_pattern(server, problems),
        wait_model_loading=server.get("wait_model_loading") is not False,
        allow_multi_status=server.get("allow_multi_status") is True,
        values=MappingProxyType({key: value.value for key, value in server.known.items()}),
    )


def _record(server: Values) -> RecordConfig | None:
    directory = _path(server.get("record"))
    if directory is None:
        return None
    share, size, files = (server.get(f"record_{name}") for name in ("share", "size", "files"))
    usual = RecordConfig(directory=directory)
    return RecordConfig(
        directory=directory,
        share=float(share) if isinstance(share, int | float) else usual.share,
        max_bytes=size if isinstance(size, int) else usual.max_bytes,
        max_files=files if isinstance(files, int) else usual.max_files,
        redact=server.get("record_redact") is True,
    )


def _batch(server: Values) -> BatchConfig | None:
    directory = _path(server.get("batch_dir"))
    if directory is None:
        return None
    size, concurrency = server.get("batch_dir_size"), server.get("batch_concurrency")
    usual = BatchConfig(directory=directory)
    return BatchConfig(
        directory=directory,
        max_bytes=size if isinstance(size, int) else usual.max_bytes,
        concurrency=concurrency if isinstance(concurrency, int) else usual.concurrency,
    )


def _number(values: Values, key: str) -> int | None:
    value = values.get(key)
    return value if isinstance(value, int) else None


def _keys(values: Values) -> tuple[str, ...]:
    """The launcher's key and the others."""
    keys = (values.get("option.api_key"), *_items(values.get("api_keys")))
    return tuple(dict.fromkeys(str(key) for key in keys if key))


def _items(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else ()


def _limit(values: Values, name: str, tgi: bool) -> int | None:
    """A launcher's limit on requests; its default counts only for a launcher."""
    key = f"option.{name}"
    value = values.get(key)
    if value is None and tgi:
        value = BY_KEY[key].default
    return value if isinstance(value, int) else None


def _api(server: Values, tgi: bool) -> str:
    """A launcher's configuration asks for the launcher's protocol."""
    return str(server.get("api") or ("tgi" if tgi else "lmi"))


def _logs_json(server: Values) -> bool:
    given = server.get("log_format")
    return given == "json" or (given is None and server.get("option.json_output") is True)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _origins(server: Values) -> tuple[str, ...]:
    given = (server.get("option.cors_allow_origin"), server.get("cors_allowed_origin"))
    items = ",".join(filter(None, map(_text, given))).split(",")
    return tuple(origin.strip() for origin in items if origin.strip())


def _pattern(server: Values, problems: Problems) -> str | None:
    key = "model_url_pattern"
    pattern = _text(server.get(key))
    try:
        with warnings.catch_warnings():
            # It means the same to the Python that runs here.
            warnings.simplefilter("ignore", FutureWarning)
            re.compile(pattern or "")
    except (re.error, OverflowError, RecursionError) as error:
        text = f"{key} is not a regular expression ({error})"
        problems.error(server.where(key), text, key)
        return None
    return pattern


def _names(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, tuple) else ()


def _path(value: object) -> Path | None:
    return Path(value) if isinstance(value, str) else None


def _header(server: Values, problems: Problems) -> str:
    key = "request_id_header_key"
    name = str(server.get(key) or "x-request-id")
    if not _HEADER.fullmatch(name):
        problems.error(server.where(key), f"{key}={name[:80]!r} is not the name of a header", key)
    return name


def _error_rates(server: Values) -> dict[str, tuple[int, float]]:
    given = {kind: server.get(f"error_rate_{kind}") for kind in ("wlm", "server", "model", "any")}
    return {kind: rate for kind, rate in given.items() if isinstance(rate, tuple)}


def _statuses(server: Values) -> dict[str, int]:
    found = {}
    for name in ("bad_request", "wlm_error", "throttle_error", "server_error"):
        status = server.get(f"{name}_http_code")
        if isinstance(status, int):
            found[name] = status
    return found


def _certificate(
    server: Values, problems: Problems, inference: Address, management: Address | None
) -> tuple[Path | None, Path | None]:
    """Return certificate and key for addresses of https; others take none."""
    addresses = {"inference_address": inference, "management_address": management}
    secure = [key for key, value in addresses.items() if value and value.scheme == "https"]
    keys = ("certificate_file", "private_key_file")
    certificate, private_key = (_path(server.get(key)) for key in keys)
    if secure and (certificate is None or private_key is None):
        problems.error(
            server.where(secure[0]) or server.where(keys[0]),
            f"{secure[0]} is https, which needs certificate_file and private_key_file (PEM)",
            secure[0],
        )
    if secure:
        return certificate, private_key
    for key in keys:
        if server.get(key) is not None:
            problems.warn(server.where(key), f"{key} counts only where an address is https://", key)
    return None, None


def _inference(server: Values, problems: Problems, tgi: bool) -> Address:
    """Where to listen; a launcher does so everywhere on 3000 unless told otherwise. A flag that
    names a certificate asks for https where no address says what is spoken, as vLLM's does."""
    address = Address("http", "0.0.0.0", 3000) if tgi else Address("http", "127.0.0.1", 8080)
    has_flag = server.precedence("certificate_file") in (Precedence.SERVER_FLAG, Precedence.FLAG)
    if has_flag and server.get("management_address") is None:
        address = address._replace(scheme="https")
    address = _address("inference_address", server, problems) or address
    port = server.get("option.port")
    return address._replace(
        host=str(server.get("option.hostname") or address.host),
        port=port if isinstance(port, int) else address.port,
    )


def _management(server: Values, problems: Problems, inference: Address) -> Address | None:
    """Where management listens, or None where that is no address of its own."""
    key = "management_address"
    address = _address(key, server, problems)
    if address is None or address[1:] == inference[1:]:
        return None
    if address.port == inference.port != 0:
        problems.error(
            server.where(key),
            f"{key} has port {address.port} on {address.host}, and inference_address has it on "
            f"{inference.host}; write the same address twice, or two ports",
            key,
        )
    elif (
        not is_loopback(address.host)
        and server.get("admin_key") is None
        and server.get("open_management") is not True
    ):
        problems.warn(
            server.where(key),
            f"{key}: nothing listens on {address.host} port {address.port}, since management is "
            "for the loopback interface only without an admin_key",
            key,
        )
    return address


def _address(key: str, server: Values, problems: Problems) -> Address | None:
    given = server.get(key)
    try:
        return None if given is None else parse_address(str(given))
    except ValueError as error:
        problems.error(server.where(key), f"{key}={str(given)[:80]!r}: {error}", key)
        return None
