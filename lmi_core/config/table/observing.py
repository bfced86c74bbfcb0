"""Keys of what a server remembers of its requests: receipts."""

from lmi_core.config.table.option import honoured
from lmi_core.config.table.option import server_option as _server
from lmi_core.config.table.value_type import Bool, Bytes, Float, Int, Text

_RECEIPTS = "tests/server/models/test_recorded.py"

OPTIONS = (
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
