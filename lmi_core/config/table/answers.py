"""Keys of how answers are written and streamed, which every system reads (djl_python)."""

from lmi_core.config.table.option import Action, Option, honoured, mapped, no_effect, refused
from lmi_core.config.table.value_type import Bool, Choice, Int, Text

_COMMON = ("common",)
_DRAFT = "speculation.draft_model"
_PIPELINES = "tests/server/dialects/lmi/test_pipelines.py"
_PIPELINE = f"{_PIPELINES}::test_answers_without_a_rolling_batch"


def _formatter(name: str) -> Action:
    return honoured(
        "output_formatter",
        test="tests/server/dialects/lmi/test_lmi_formats.py::test_formatter_choice",
        capability=f"format.{name}",
    )


OPTIONS = (
    Option(
        key="option.output_formatter",
        type=Text("json, jsonlines, sse or the name of a function in model.py"),
        doc="Shape of the answer; without it a request's stream field decides.",
        systems=_COMMON,
        actions={
            "lmi": mapped(
                "output_formatter",
                capability="handler.formatter",
                by_value={
                    "json": _formatter("json"),
                    "jsonlines": _formatter("jsonlines"),
                    "sse": _formatter("sse"),
                },
            ),
        },
    ),
    Option(
        key="option.enable_streaming",
        type=Choice(("false", "true", "huggingface")),
        doc="Streaming of answers outside continuous batching.",
        systems=_COMMON,
        default="false",
        deprecated="since 0.25: continuous batching streams whenever a request asks for it",
        actions={
            "lmi": honoured(
                None,
                "beside option.rolling_batch=disable, as LMI streams without a rolling batch; else "
                "a request asks for a stream",
                test=f"{_PIPELINES}::test_streams_without_a_rolling_batch",
                idle=("false",),
                by_value={
                    "false": no_effect("continuous batching streams whenever a request asks")
                },
            )
        },
    ),
    Option(
        key="option.waiting_steps",
        type=Int(0),
        doc="Decode steps during which new requests are held back.",
        systems=(*_COMMON, "accelerate"),
        actions={
            "lmi": honoured(
                "waiting_steps",
                test="tests/config/test_honoured_limits.py::test_new_requests_wait_for_steps",
            )
        },
    ),
    Option(
        key="option.draft_model_id",
        type=Text("model"),
        doc="Reserved by the reference for a draft model.",
        systems=_COMMON,
        actions={"lmi": mapped("speculation.draft_model", capability=_DRAFT, tuning=True)},
    ),
    Option(
        key="option.spec_length",
        type=Int(0),
        doc="Reserved by the reference: tokens drafted per step.",
        systems=_COMMON,
        default=0,
        actions={"lmi": mapped("speculation.max_draft_tokens", capability=_DRAFT, tuning=True)},
    ),
    Option(
        key="option.tgi_compat",
        type=Bool(),
        doc="Answer in the shape of text-generation-inference.",
        systems=_COMMON,
        default=False,
        actions={
            "lmi": honoured(
                "tgi_compat",
                test="tests/server/dialects/lmi/test_lmi_formats.py::test_tgi_compat",
                capability="format.tgi_compat",
                idle=(False,),
            )
        },
    ),
    Option(
        key="option.lmi_compat",
        type=Choice(("0.24", "0.25", "0.26", "0.27", "0.28", "0.29")),
        doc="LMI release whose answers and errors clients of /invocations expect.",
        systems=_COMMON,
        actions={
            "lmi": honoured(
                "lmi_compat",
                test="tests/server/dialects/lmi/test_lmi_releases.py::test_json_details",
            )
        },
    ),
    Option(
        key="option.bedrock_compat",
        type=Bool(),
        doc="Third-party request and answer format.",
        systems=_COMMON,
        default=False,
        actions={"lmi": refused("send LMI, TGI or OpenAI requests", idle=(False,))},
    ),
)
