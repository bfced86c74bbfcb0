"""Flags and variables of the text-generation-inference launcher that have no LMI key."""

from lmi_core.config.table.option import (
    Action,
    Flag,
    Option,
    honoured,
    mapped,
    no_effect,
    refused,
)
from lmi_core.config.table.value_type import Bool, Choice, Float, Int, Items, Text, ValueType
from lmi_core.config.table.vllm import CHAT_TEMPLATE

_ROPE = "tests/config/test_honoured.py::test_rotary_settings"
_MIXED = no_effect(
    "prompts are chunked and mixed with decoding, so none waits for decoding to pause; TGI ignores "
    "it then, too"
)
_OWN_KERNELS = no_effect("the engine has kernels of its own; lmi doctor names them")
_INTERNAL = no_effect("no shard processes are started")
_WATERMARK = honoured(
    None,
    "of requests with watermark: true on TGI's and LMI's routes",
    capability="request.watermark",
    tuning=True,
    test="tests/server/dialects/tgi/test_tgi_http.py::test_watermarks",
)
_TRACES = "tests/server/http/test_tracing.py"
_LIMITS = "tests/cli/test_options.py::test_limits_of_a_launcher"


def _tgi(
    flag: str,
    kind: ValueType,
    doc: str,
    action: Action,
    default: object = None,
    *,
    aliases: tuple[str, ...] = (),
    switch: bool = False,
    secret: bool = False,
    server: bool = False,
    legacy_env: str | None = None,
    vllm: Action | None = None,
    env: tuple[str, ...] = (),
) -> Option:
    name = flag.removeprefix("--").replace("-", "_")
    return Option(
        key=f"option.{name}",
        type=kind,
        doc=doc,
        systems=("tgi",),
        default=default,
        env=env,
        flag=Flag(flag, name.upper(), legacy_env, aliases, switch),
        scope="server" if server else "model",
        actions={"server" if server else "lmi": action, **({"vllm": vllm} if vllm else {})},
        secret=secret,
    )


def _variable(
    name: str, kind: ValueType, doc: str, action: Action, *, server: bool = False
) -> Option:
    """What the launcher and its worker read of the environment alone; here it is a flag, too."""
    return _tgi(f"--{name.lower().replace('_', '-')}", kind, doc, action, server=server)


def _later(flag: str, kind: ValueType, doc: str, why: str, *, switch: bool = False) -> Option:
    return _tgi(flag, kind, doc, no_effect(why), switch=switch, server=True)


OPTIONS = (
    _tgi(
        "--sharded",
        Choice(("true", "false"), exact=True),
        "Shard the model over all visible devices.",
        mapped(None, "true: all visible GPUs share a copy, unless --num-shard says how many"),
    ),
    _tgi(
        "--speculate",
        Int(0),
        "Tokens drafted per step by n-gram or the model's extra heads.",
        honoured(
            "speculation.max_draft_tokens",
            "by n-gram, and fewer where so many don't pay; tokens are the same",
            test="tests/config/test_speculation.py::test_how_many_tokens_are_drafted",
            capability="speculation.ngram",
            tuning=True,
            idle=(0,),
            by_value={0: mapped(None, "nothing is drafted")},
        ),
    ),
    _tgi(
        "--max-best-of",
        Int(1),
        "Most candidates a request may ask for.",
        honoured("max_best_of", test=_LIMITS),
        2,
        server=True,
    ),
    _tgi(
        "--max-stop-sequences",
        Int(0),
        "Most stop texts in a request.",
        honoured("max_stop_sequences", test=_LIMITS),
        4,
        server=True,
    ),
    _tgi(
        "--max-top-n-tokens",
        Int(0),
        "Most alternative tokens a request may ask for.",
        honoured("max_top_n_tokens", test=_LIMITS),
        5,
        server=True,
    ),
    _tgi(
        "--max-input-tokens",
        Int(1),
        "Most tokens of a prompt.",
        honoured("max_input_tokens", "limit of prompts on TGI's routes", test=_LIMITS),
        aliases=("--max-input-length",),
        legacy_env="MAX_INPUT_LENGTH",
    ),
    _tgi(
        "--max-total-tokens",
        Int(1),
        "Most tokens of one sequence, prompt and answer together.",
        honoured(
            "max_model_len",
            test="tests/config/test_honoured_limits.py::test_length_of_a_sequence",
        ),
    ),
    _tgi(
        "--waiting-served-ratio",
        Float(0),
        "Waiting to running ratio at which prefill interrupts decoding.",
        _MIXED,
        0.3,
    ),
    _tgi(
        "--max-batch-total-tokens",
        Int(1),
        "Token budget of the running batch.",
        honoured(
            "max_batch_total_tokens",
            "the size of the KV cache, where memory has room for it",
            test="tests/config/test_honoured_limits.py::test_tokens_of_the_batch",
        ),
    ),
    _tgi(
        "--max-waiting-tokens",
        Int(0),
        "Decode steps until waiting requests are let in.",
        _MIXED,
        20,
    ),
    _tgi(
        "--disable-custom-kernels",
        Bool(),
        "Avoid custom CUDA kernels.",
        no_effect("there are no such kernels; option.enforce_eager runs the plain path"),
        False,
        switch=True,
    ),
    _tgi(
        "--rope-scaling",
        Choice(("linear", "dynamic"), exact=True),
        "Rotary scaling.",
        honoured("rope_scaling", test=_ROPE),
    ),
    _tgi(
        "--rope-factor",
        Float(1),
        "Factor of rotary scaling.",
        honoured("rope_factor", test=_ROPE),
    ),
    _tgi(
        "--tokenizer-config-path",
        Text("path"),
        "File that supplies the chat template and special tokens.",
        honoured(None, "its chat template and special tokens are used", test=CHAT_TEMPLATE),
    ),
    _tgi(
        "--lora-adapters",
        Items(Text("id, id=path, id@revision or id=path@revision")),
        "LoRA adapters to load.",
        honoured(
            None,
            "registered at load",
            test="tests/config/test_lora_settings.py::test_adapters_that_a_launcher_names_answer",
            capability="lora",
        ),
        vllm=mapped(None, "registered at load", capability="lora"),
    ),
    _tgi(
        "--validation-workers",
        Int(0),
        "Tokenizer threads.",
        no_effect("tokenising uses the server's own threads"),
        2,
        server=True,
    ),
    _tgi(
        "--cuda-graphs",
        Items(Int(0)),
        "Batch sizes captured as CUDA graphs; 0 for none.",
        no_effect("the lmi engine replays its own recorded graph"),
    ),
    _tgi(
        "--hostname",
        Text("address"),
        "Address to listen on.",
        honoured("host", test="tests/cli/test_native.py::test_serve_from_a_launchers_command_line"),
        "0.0.0.0",
        server=True,
    ),
    _tgi(
        "--port",
        Int(0, 65535),
        "Port to listen on.",
        honoured("port", test="tests/cli/test_options.py::test_port_and_log_of_a_launcher"),
        3000,
        aliases=("-p",),
        server=True,
        env=("SAGEMAKER_BIND_TO_PORT",),
    ),
    _tgi("--shard-uds-path", Text("path"), "Socket of the shards.", _INTERNAL, server=True),
    _tgi("--master-addr", Text("host"), "Address of the first shard.", _INTERNAL, server=True),
    _tgi("--master-port", Int(0, 65535), "Port of the first shard.", _INTERNAL, server=True),
    _tgi(
        "--huggingface-hub-cache",
        Text("path"),
        "Directory of the hub cache.",
        honoured(
            "hub_cache",
            test="tests/config/artefacts/test_hub.py::test_a_model_is_downloaded_once_without_its_code",
        ),
        server=True,
    ),
    _tgi(
        "--weights-cache-override",
        Text("path"),
        "Directory of the hub cache, for weights only.",
        no_effect("set --huggingface-hub-cache"),
        server=True,
    ),
    _tgi(
        "--json-output",
        Bool(),
        "Log as JSON.",
        honoured(
            None,
            "log_format=json",
            test="tests/cli/test_options.py::test_port_and_log_of_a_launcher",
        ),
        switch=True,
        server=True,
    ),
    _tgi(
        "--otlp-endpoint",
        Text("URL"),
        "OpenTelemetry collector that spans of requests go to, by gRPC; by HTTP where the port is "
        "4318 or OTEL_EXPORTER_OTLP_PROTOCOL says so.",
        honoured("otlp_endpoint", "extra otel", test=f"{_TRACES}::test_spans_reach_a_collector"),
        server=True,
        env=("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"),
    ),
    _tgi(
        "--otlp-service-name",
        Text("name"),
        "Name of the service in spans; lmi unless it is given.",
        honoured("otlp_service_name", test=f"{_TRACES}::test_spans_reach_a_collector"),
        server=True,
        env=("OTEL_SERVICE_NAME",),
    ),
    _tgi(
        "--cors-allow-origin",
        Text("origin"),
        "Origin that browsers may call from.",
        honoured(
            "cors_origins",
            test="tests/server/test_dialects.py::test_cors_names_allowed_origins_only",
        ),
        server=True,
    ),
    _tgi(
        "--watermark-gamma",
        Float(0, 1),
        "Share of the vocabulary favoured by the watermark.",
        _WATERMARK,
        0.5,
    ),
    _tgi(
        "--watermark-delta",
        Float(),
        "Bias of the watermark.",
        _WATERMARK,
        2.0,
    ),
    _tgi(
        "--ngrok",
        Bool(),
        "Open a tunnel.",
        refused("use a proxy", idle=(False,)),
        switch=True,
        server=True,
    ),
    _tgi(
        "--ngrok-authtoken",
        Text("token"),
        "Token of the tunnel.",
        no_effect("no tunnel is opened"),
        secret=True,
        server=True,
    ),
    _tgi(
        "--ngrok-edge",
        Text("name"),
        "Edge of the tunnel.",
        no_effect("no tunnel is opened"),
        server=True,
    ),
    _tgi(
        "--disable-grammar-support",
        Bool(),
        "Refuse requests with a grammar.",
        honoured(
            "disable_grammar_support",
            test="tests/server/test_structured.py::test_grammars_can_be_disabled",
        ),
        False,
        switch=True,
        server=True,
    ),
    _tgi(
        "--max-client-batch-size",
        Int(1),
        "Most prompts in one request.",
        honoured("max_client_batch_size", test=_LIMITS),
        4,
        server=True,
    ),
    _later("--disable-usage-stats", Bool(), "No statistics.", "nothing is sent", switch=True),
    _later("--disable-crash-reports", Bool(), "No crash reports.", "nothing is sent", switch=True),
    _later("--usage-stats", Choice(("on", "off", "no-stack")), "Statistics.", "nothing is sent"),
    _tgi(
        "--api-key",
        Text("key"),
        "Key that every request must bring.",
        honoured("api_key", test="tests/server/test_dialects.py::test_api_key"),
        secret=True,
        server=True,
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
    _variable("ATTENTION", Text("kernel"), "Attention kernels.", _OWN_KERNELS),
    _variable("USE_FLASH_ATTENTION", Text("true or false"), "Flash attention.", _OWN_KERNELS),
    _variable("EXLLAMA_VERSION", Int(1), "ExLlama kernels for GPTQ.", _OWN_KERNELS),
    _variable("DISABLE_EXLLAMA", Text("True"), "No ExLlama kernels.", _OWN_KERNELS),
    _variable(
        "COMPUTE_TYPE",
        Text("words"),
        "The header x-compute-type of answers.",
        honoured(
            None,
            "x-compute-type",
            test="tests/server/dialects/tgi/test_tgi_http.py::test_the_compute_type",
        ),
        server=True,
    ),
    _variable(
        "HF_HUB_ENABLE_HF_TRANSFER",
        Text("0 or 1"),
        "Faster downloads.",
        no_effect("huggingface_hub chooses how it downloads"),
        server=True,
    ),
    _variable(
        "MESSAGES_API_ENABLED",
        Bool(),
        "Chats on /invocations.",
        no_effect("/invocations takes any of the bodies"),
        server=True,
    ),
    _variable(
        "MAX_IMAGE_FETCH_SIZE",
        Int(0),
        "Bytes of an image that is fetched.",
        no_effect("images aren't taken"),
        server=True,
    ),
    _variable("USE_CUTLASS_W8A8", Text("1"), "CUTLASS kernels for 8 bits.", _OWN_KERNELS),
    _variable(
        "PREFILL_CHUNKING",
        Bool(),
        "Split long prompts over steps.",
        no_effect("prompts are always chunked; tokens are the same"),
    ),
    _variable(
        "TGI_WIGGLE_ROOM",
        Float(0),
        "Share of the device memory that is used.",
        no_effect("option.gpu_memory_utilization is that share"),
    ),
    _tgi(
        "--payload-limit",
        Int(1),
        "Largest request body in bytes.",
        honoured(
            "max_request_size",
            test=_LIMITS,
        ),
        2_000_000,
        server=True,
    ),
    _tgi(
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
        server=True,
    ),
    _tgi(
        "--graceful-termination-timeout",
        Int(0),
        "Seconds that running requests have to end.",
        honoured(
            "drain_timeout_s", test="tests/server/http/test_connections.py::test_draining_times_out"
        ),
        90,
        aliases=("-g",),
        server=True,
    ),
    _later(
        "--prometheus-port", Int(0, 65535), "Port of metrics.", "metrics share the server's port"
    ),
)
