"""Flags and variables of the text-generation-inference launcher that are about the server."""

from functools import partial

from lmi_core.config.table.option import Flag, Option, honoured, no_effect, refused
from lmi_core.config.table.tgi import tgi_flag, tgi_variable
from lmi_core.config.table.value_type import Bool, Choice, Int, Text, ValueType

_INTERNAL = no_effect("ranks find each other without it")
_TRACES = "tests/server/http/test_tracing.py"
_LIMITS = "tests/cli/test_options.py::test_limits_of_a_launcher"
_flag = partial(tgi_flag, server=True)
_variable = partial(tgi_variable, server=True)


def _later(flag: str, kind: ValueType, doc: str, why: str, *, switch: bool = False) -> Option:
    return _flag(flag, kind, doc, no_effect(why), switch=switch)


OPTIONS = (
    _flag(
        "--max-best-of",
        Int(1),
        "Most candidates a request may ask for.",
        honoured("max_best_of", test=_LIMITS),
        2,
    ),
    _flag(
        "--max-stop-sequences",
        Int(0),
        "Most stop texts in a request.",
        honoured("max_stop_sequences", test=_LIMITS),
        4,
    ),
    _flag(
        "--max-top-n-tokens",
        Int(0),
        "Most alternative tokens a request may ask for.",
        honoured("max_top_n_tokens", test=_LIMITS),
        5,
    ),
    _flag(
        "--validation-workers",
        Int(0),
        "Tokenizer threads.",
        no_effect("tokenising uses the server's own threads"),
        2,
    ),
    _flag(
        "--hostname",
        Text("address"),
        "Address to listen on.",
        honoured("host", test="tests/cli/test_native.py::test_serve_from_a_launchers_command_line"),
        "0.0.0.0",
    ),
    _flag(
        "--port",
        Int(0, 65535),
        "Port to listen on.",
        honoured("port", test="tests/cli/test_options.py::test_port_and_log_of_a_launcher"),
        3000,
        aliases=("-p",),
        env=("SAGEMAKER_BIND_TO_PORT",),
    ),
    _flag("--shard-uds-path", Text("path"), "Socket of the shards.", _INTERNAL),
    _flag("--master-addr", Text("host"), "Address of the first shard.", _INTERNAL),
    _flag("--master-port", Int(0, 65535), "Port of the first shard.", _INTERNAL),
    _flag(
        "--huggingface-hub-cache",
        Text("path"),
        "Directory of the hub cache.",
        honoured(
            "hub_cache",
            test="tests/config/artefacts/test_hub.py::test_a_model_is_downloaded_once_without_its_code",
        ),
    ),
    _flag(
        "--weights-cache-override",
        Text("path"),
        "Directory of the hub cache, for weights only.",
        no_effect("set --huggingface-hub-cache"),
    ),
    _flag(
        "--json-output",
        Bool(),
        "Log as JSON.",
        honoured(
            None,
            "log_format=json",
            test="tests/cli/test_options.py::test_port_and_log_of_a_launcher",
        ),
        switch=True,
    ),
    _flag(
        "--otlp-endpoint",
        Text("URL"),
        "OpenTelemetry collector that spans of requests go to, by gRPC; by HTTP where the port is "
        "4318 or OTEL_EXPORTER_OTLP_PROTOCOL says so.",
        honoured("otlp_endpoint", "extra otel", test=f"{_TRACES}::test_spans_reach_a_collector"),
        env=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    ),
    _flag(
        "--otlp-service-name",
        Text("name"),
        "Name of the service in spans; lmi unless it is given.",
        honoured("otlp_service_name", test=f"{_TRACES}::test_spans_reach_a_collector"),
        env=("OTEL_SERVICE_NAME",),
    ),
    _flag(
        "--cors-allow-origin",
        Text("origin"),
        "Origin that browsers may call from.",
        honoured(
            "cors_origins",
            test="tests/server/test_dialects.py::test_cors_names_allowed_origins_only",
        ),
    ),
    _flag(
        "--ngrok",
        Bool(),
        "Open a tunnel.",
        refused("use a proxy", idle=(False,)),
        switch=True,
    ),
    _flag(
        "--ngrok-authtoken",
        Text("token"),
        "Token of the tunnel.",
        no_effect("no tunnel is opened"),
        secret=True,
    ),
    _flag(
        "--ngrok-edge",
        Text("name"),
        "Edge of the tunnel.",
        no_effect("no tunnel is opened"),
    ),
    _flag(
        "--disable-grammar-support",
        Bool(),
        "Refuse requests with a grammar.",
        honoured(
            "disable_grammar_support",
            test="tests/server/test_structured.py::test_grammars_can_be_disabled",
        ),
        False,
        switch=True,
    ),
    _flag(
        "--max-client-batch-size",
        Int(1),
        "Most prompts in one request.",
        honoured("max_client_batch_size", test=_LIMITS),
        4,
    ),
    _later("--disable-usage-stats", Bool(), "No statistics.", "nothing is sent", switch=True),
    _later("--disable-crash-reports", Bool(), "No crash reports.", "nothing is sent", switch=True),
    _later("--usage-stats", Choice(("on", "off", "no-stack")), "Statistics.", "nothing is sent"),
    _flag(
        "--api-key",
        Text("key"),
        "Key that every request must bring.",
        honoured("api_key", test="tests/server/test_dialects.py::test_api_key"),
        secret=True,
        env=("VLLM_API_KEY",),
    ),
    Option(
        key="option.print_environment",
        type=Bool(),
        doc="Print a report of the environment at the start.",
        systems=("tgi",),
        flag=Flag("--env", aliases=("-e",), switch=True),
        scope="server",
        actions={"server": no_effect("lmi doctor prints the machine and what is installed")},
    ),
    _variable(
        "COMPUTE_TYPE",
        Text("words"),
        "The header x-compute-type of answers.",
        honoured(
            None,
            "x-compute-type",
            test="tests/server/dialects/tgi/test_tgi_http.py::test_the_compute_type",
        ),
    ),
    _variable(
        "HF_HUB_ENABLE_HF_TRANSFER",
        Text("0 or 1"),
        "Faster downloads.",
        no_effect("huggingface_hub chooses how it downloads"),
    ),
    _variable(
        "MESSAGES_API_ENABLED",
        Bool(),
        "Chats on /invocations.",
        no_effect("/invocations takes any of the bodies"),
    ),
    _variable(
        "MAX_IMAGE_FETCH_SIZE",
        Int(0),
        "Bytes of an image that is fetched.",
        no_effect("images aren't taken"),
    ),
    _flag(
        "--payload-limit",
        Int(1),
        "Largest request body in bytes.",
        honoured(
            "max_request_size",
            test=_LIMITS,
        ),
        2_000_000,
    ),
    _flag(
        "--enable-prefill-logprobs",
        Bool(),
        "Allow log probabilities of the prompt.",
        honoured(
            "enable_prefill_logprobs",
            "tgi_version=2 allows them without",
            test="tests/cli/test_options.py::test_port_and_log_of_a_launcher",
        ),
        False,
        switch=True,
    ),
    _flag(
        "--graceful-termination-timeout",
        Int(0),
        "Seconds that running requests have to end.",
        honoured(
            "drain_timeout_s", test="tests/server/http/test_connections.py::test_draining_times_out"
        ),
        90,
        aliases=("-g",),
    ),
    _later(
        "--prometheus-port", Int(0, 65535), "Port of metrics.", "metrics share the server's port"
    ),
)
