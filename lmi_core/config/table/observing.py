"""Keys of what a server says and remembers of its requests: metrics, its log, receipts."""

from lmi_core.config.table.option import Flag, honoured, no_effect
from lmi_core.config.table.option import server_option as _server
from lmi_core.config.table.value_type import Bool, Bytes, Choice, Float, Int, Items, Text

_NAME_AND_LOG = "tests/cli/test_options.py::test_name_log_and_size"
_RECEIPTS = "tests/server/models/test_recorded.py"

OPTIONS = (
    _server(
        "prometheus",
        Bool(),
        "Serve metrics in Prometheus' format.",
        no_effect("always served, at /metrics and /server/metrics, under names of our own"),
    ),
    _server(
        "metric_aliases",
        Items(Choice(("vllm", "tgi", "djl"))),
        "Other servers whose names /metrics has besides our own: vllm, which is also what the "
        "Kubernetes inference gateway reads, tgi, and djl, whose times are in microseconds.",
        honoured(
            "metric_aliases",
            test="tests/server/http/test_metric_aliases.py::test_a_server_has_the_names_asked_for",
        ),
    ),
    _server(
        "log_format",
        Choice(("console", "json")),
        "Form of log lines.",
        honoured("log_format", test=_NAME_AND_LOG),
        "console",
    ),
    _server(
        "log_level",
        Choice(("debug", "info", "warning", "error")),
        "Least severity that is logged.",
        honoured("log_level", test=_NAME_AND_LOG),
        "info",
        "VLLM_LOGGING_LEVEL",
        flag=Flag("--log-level", "LOG_LEVEL"),
    ),
    _server(
        "verbose",
        Bool(),
        "Print every route once the server listens.",
        honoured("verbose", test="tests/server/test_process.py::test_routes_are_printed_if_asked"),
        False,
    ),
    _server(
        "record",
        Text("path"),
        "Directory for receipts of requests and their answers, which lmi replay asks again; each "
        "API key's lie in a directory of their own.",
        honoured(
            "record",
            "of models on the lmi engine that generate; embeddings and scores aren't recorded",
            test=f"{_RECEIPTS}::test_a_tenant_has_its_own",
        ),
    ),
    _server(
        "record_share",
        Float(0, 1),
        "Share of the requests that are recorded, drawn by chance.",
        honoured("record.share", test=f"{_RECEIPTS}::test_what_is_recorded_is_configured"),
        1.0,
    ),
    _server(
        "record_size",
        Bytes(),
        "Most bytes of all receipts; the oldest files of whoever has the most go.",
        honoured("record.max_bytes", test=f"{_RECEIPTS}::test_what_is_recorded_is_configured"),
        1 << 30,
    ),
    _server(
        "record_files",
        Int(1),
        "Most files of receipts.",
        honoured("record.max_files", test=f"{_RECEIPTS}::test_what_is_recorded_is_configured"),
        64,
    ),
    _server(
        "record_redact",
        Bool(),
        "Keep of each request how much was asked and answered, and by which parameters, not what.",
        honoured("record.redact", test=f"{_RECEIPTS}::test_what_is_recorded_is_configured"),
        False,
    ),
)
