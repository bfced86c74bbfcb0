"""Keys of the server as a whole: ``config.properties`` and ``SERVING_*`` variables."""

from lmi_core.config.table.option import Option, honoured, mapped, needs, no_effect
from lmi_core.config.table.option import server_option as _server
from lmi_core.config.table.value_type import (
    Bool,
    Bytes,
    Choice,
    Float,
    Int,
    Items,
    Rate,
    Text,
)

APIS = ("lmi", "tgi", "openai")
"""The protocols that shared routes can speak."""

_DIALECTS = "tests/server/test_dialects.py"
_NAME_AND_LOG = "tests/cli/test_options.py::test_name_log_and_size"
_JAVA = no_effect("belongs to the Java server; none runs here")
_KEYSTORE = needs("server.keystore", "write certificate_file and private_key_file", idle=())
_HEADERS = "tests/cli/test_options.py::test_headers_and_statuses"
_BATCHES = "tests/server/batches/test_batches.py::test_the_options_of_a_configuration"
_TENANTS = "tests/server/http/test_tenants.py"
_TLS = honoured(
    None,
    "of the server, where an address is https://",
    test="tests/cli/test_options.py::test_https",
)
_CORS = honoured(None, "answered to a browser's preflight", test=_HEADERS)
_LIMITS_OF_ANSWERS = "tests/server/http/test_answer_deadline.py::test_silence_ends_an_answer"
_ERROR_RATE = honoured(
    None,
    "more of them and /ping answers 503",
    test="tests/server/http/test_error_rates.py::test_ping_answers_503_from_then_on",
)


def _status(key: str, default: int) -> Option:
    return _server(
        key,
        Int(200, 599),
        "HTTP status of this kind of failure.",
        honoured(None, "on LMI's routes", test=_HEADERS, idle=(default,))
        if key != "timeout_http_code"
        else no_effect("an answer that takes too long ends like one whose step failed"),
        default,
    )


OPTIONS = (
    _server(
        "api",
        Choice(APIS),
        "Protocol of the routes that several have, and of errors outside routes.",
        honoured("api", test=f"{_DIALECTS}::test_owner"),
        "lmi",
    ),
    _server(
        "tgi_version",
        Choice(("2", "3")),
        "Release that TGI's routes answer like: 2 for 2.4, 3 for 3.3.",
        honoured("tgi_version", test="tests/server/dialects/tgi/test_tgi_options.py::test_release"),
        "2",
    ),
    _server(
        "inference_address",
        Text("http://host:port or unix:/path"),
        "Address of the inference routes.",
        honoured(
            None,
            "address to listen on",
            test="tests/config/test_addresses.py::test_addresses",
        ),
        "http://127.0.0.1:8080",
    ),
    _server(
        "management_address",
        Text("http://host:port or unix:/path"),
        "Address of the management routes.",
        honoured(
            None,
            "address that has the management routes alone, where it isn't inference_address",
            test="tests/server/management/test_management_address.py::test_management_has_its_own_port",
        ),
        "http://127.0.0.1:8080",
    ),
    _server(
        "load_models",
        Text("list of models"),
        "Models to load at start.",
        honoured(
            None,
            "names the models to serve: directories, archives, s3:// prefixes",
            test="tests/config/test_named_models.py::test_load_models_names_the_models",
        ),
    ),
    _server(
        "model_store",
        Text("path"),
        "Directory of models.",
        honoured(
            None,
            "scanned for models to serve",
            test="tests/config/test_named_models.py::test_model_store_is_scanned",
        ),
    ),
    _server(
        "model_url_pattern",
        Text("regular expression"),
        "Model URLs that may be loaded while the server runs.",
        honoured(
            None,
            "models that POST /models may load from outside the model store, that requests bring "
            "as model_url with a new model_name, and archives that load_models may name by http",
            test="tests/server/management/test_registration.py::test_only_urls_of_the_store_or_the_pattern_are_loaded",
        ),
    ),
    _server(
        "admin_key",
        Text("key"),
        "Opens the management routes, also where the server isn't on the loopback interface.",
        honoured(
            "admin_key", test="tests/server/management/test_management_access.py::test_admin_key"
        ),
        secret=True,
    ),
    _server(
        "api_keys",
        Items(Text("key")),
        "Keys of which every request must bring one, beside --api-key's; each is a tenant.",
        honoured("api_keys", test=f"{_TENANTS}::test_keys_come_from_the_configuration"),
        secret=True,
    ),
    _server(
        "max_tenant_requests",
        Int(1),
        "Requests of one API key that are in flight; one more is answered 429 with Retry-After.",
        honoured("max_tenant_requests", test=f"{_TENANTS}::test_requests_in_flight"),
    ),
    _server(
        "max_tenant_tokens_per_minute",
        Int(1),
        "Tokens of prompts and answers that one API key may use a minute; then 429.",
        honoured(
            "max_tenant_tokens_per_minute",
            test=f"{_TENANTS}::test_a_key_that_used_its_tokens_waits_alone",
        ),
    ),
    _server(
        "share_prefix_cache",
        Bool(),
        "Whether requests of different API keys share cached prefixes, as for a common system "
        "prompt; cached_tokens then tells one what another has asked.",
        honoured("share_prefix_cache", test=f"{_TENANTS}::test_keys_share_no_prefixes"),
        False,
    ),
    _server(
        "open_management",
        Bool(),
        "Management routes without an admin_key also for other machines, where something else "
        "keeps strangers out, as SageMaker's multi-model endpoints do.",
        honoured(
            "open_management",
            test="tests/server/management/test_management_access.py::test_open_management",
        ),
        False,
        "SAGEMAKER_MULTI_MODEL",
    ),
    _server(
        "allow_custom_code",
        Bool(),
        "Run the Python code of models that are registered while the server runs.",
        honoured(
            "allow_custom_code",
            test="tests/server/management/test_registration.py::test_custom_code_must_be_allowed",
        ),
        False,
    ),
    _server(
        "wait_model_loading",
        Bool(),
        "Open the port only after the models are loaded.",
        honoured(
            "wait_model_loading",
            test="tests/server/models/test_models_process.py::test_port_may_open_before_models_are_loaded",
        ),
        True,
    ),
    _server(
        "allow_multi_status",
        Bool(),
        "Answer 207 to /ping while models load.",
        honoured(
            "allow_multi_status", test="tests/server/models/test_models.py::test_ping_while_loading"
        ),
        False,
    ),
    _server("number_of_netty_threads", Int(0), "I/O threads.", _JAVA, 0),
    _server(
        "max_request_size",
        Bytes(),
        "Largest request body in bytes.",
        honoured(
            "max_request_size",
            test=_NAME_AND_LOG,
        ),
        67108864,
        "SAGEMAKER_MAX_REQUEST_SIZE",
        "SAGEMAKER_MAX_PAYLOAD_IN_MB",
    ),
    _server(
        "response_store_size",
        Bytes(),
        "Memory for responses of /v1/responses that are stored, to be gone on from or asked for "
        "again: the newest that fit, in bytes; 0 stores none.",
        honoured(
            "response_store_bytes",
            test="tests/server/dialects/openai/test_responses_store.py::test_a_response_that_does_not_fit_says_so",
        ),
        67108864,
    ),
    _server(
        "batch_dir",
        Text("path"),
        "Directory of the Batch API's files and batches (/v1/files, /v1/batches), which a restart "
        "goes on with. Without it there is no Batch API.",
        honoured("batch", test=_BATCHES),
    ),
    _server(
        "batch_dir_size",
        Bytes(),
        "Most bytes of one API key's files in batch_dir.",
        honoured("batch", test=_BATCHES),
        1 << 30,
    ),
    _server(
        "batch_concurrency",
        Int(1),
        "Requests of batches that are answered at once, behind all others.",
        honoured("batch", test=_BATCHES),
        8,
    ),
    _server(
        "max_archive_size",
        Bytes(),
        "Longest archive of a model that is fetched, and most bytes that it may unpack to.",
        honoured(
            None,
            "and 1 GiB of the disk stays free, or a tenth where that is less",
            test="tests/config/artefacts/test_archives.py::test_the_limit_is_the_configurations",
        ),
        64 << 30,
    ),
    _server(
        "chunked_read_timeout",
        Int(1),
        "Seconds between two pieces of an answer.",
        honoured("limits", "where it is given", test=_LIMITS_OF_ANSWERS),
        60,
    ),
    _server(
        "cors_allowed_origin",
        Text("origins"),
        "Origins that browsers may call from, separated by commas; * for all.",
        honoured("cors_origins", test=f"{_DIALECTS}::test_cors_names_allowed_origins_only"),
    ),
    _server("cors_allowed_methods", Text("methods"), "Access-Control-Allow-Methods.", _CORS),
    _server("cors_allowed_headers", Text("headers"), "Access-Control-Allow-Headers.", _CORS),
    _server("keystore", Text("path"), "Key store of TLS.", _KEYSTORE),
    _server(
        "keystore_pass", Text("password"), "Password of it.", _KEYSTORE, "changeit", secret=True
    ),
    _server("keystore_type", Text("type"), "Type of it.", _KEYSTORE, "PKCS12"),
    _server("certificate_file", Text("path"), "Certificate of TLS.", _TLS),
    _server("private_key_file", Text("path"), "Private key of TLS.", _TLS),
    _server("plugin_folder", Text("path"), "Directory of Java plug-ins.", _JAVA, "plugins"),
    _server("error_rate_wlm", Rate(), "Most failures in a minute, or in a time.", _ERROR_RATE),
    _server("error_rate_server", Rate(), "Most failures in a minute, or in a time.", _ERROR_RATE),
    _server("error_rate_model", Rate(), "Most failures in a minute, or in a time.", _ERROR_RATE),
    _server("error_rate_any", Rate(), "Most failures in a minute, or in a time.", _ERROR_RATE),
    _status("bad_request_http_code", 400),
    _status("wlm_error_http_code", 503),
    _status("throttle_error_http_code", 503),
    _status("timeout_http_code", 400),
    _status("server_error_http_code", 500),
    _server(
        "request_id_header_key",
        Text("header"),
        "Header that carries the request id.",
        honoured("request_id_header", test=_HEADERS),
        "x-request-id",
    ),
    _server(
        "cluster_address",
        Text("http://host:port"),
        "Address of the multi-host protocol.",
        needs("parallel.cluster", tuning=True, idle=("http://0.0.0.0:8888",)),
        "http://0.0.0.0:8888",
    ),
    _server(
        "ui",
        Bool(),
        "Serve a page for people at /ui, and at / to browsers: live figures, a playground, the "
        "configuration, the routes; and the interface at /docs.",
        honoured("ui", test="tests/server/http/test_ui.py::test_the_page_is_for_everybody"),
        False,
    ),
    _server(
        "strict_requests",
        Bool(),
        "Refuse requests with unknown fields (422) instead of ignoring and reporting those.",
        honoured(
            "strict_requests",
            test="tests/server/test_fields.py::test_unknown_fields_are_reported_or_refused",
        ),
        False,
    ),
    _server(
        "ignore_watermark",
        Bool(),
        "Serve TGI's requests for a watermark without one, and say so.",
        honoured(
            None,
            "reported in x-lmi-ignored-parameters",
            test="tests/server/dialects/tgi/test_tgi_http.py::test_watermarks_may_be_ignored",
        ),
        False,
    ),
    _server(
        "request_timeout",
        Float(0, 86400, above=True),
        "Seconds a connection has to deliver its headers, and then its body.",
        honoured(
            "receive_timeout_s", test="tests/server/http/test_connections.py::test_slow_body_is_408"
        ),
        30.0,
    ),
    _server(
        "download_dir",
        Text("path"),
        "Directory of downloads.",
        honoured(
            "download_dir",
            test="tests/config/artefacts/test_s3.py::test_a_prefix_is_downloaded_checked_and_reused",
        ),
    ),
    _server(
        "features",
        Text("list of libraries"),
        "Libraries of the container image.",
        mapped(None, "which library serves a model whose configuration names none"),
    ),
    _server(
        "offline",
        Bool(),
        "Download nothing.",
        honoured(
            "offline",
            test="tests/config/artefacts/test_hub.py::test_offline_and_fixed_commits_need_no_client",
        ),
        False,
        "DJL_OFFLINE",
        "HF_HUB_OFFLINE",
    ),
)
