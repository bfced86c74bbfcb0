"""The exact bytes of LMI 0.24 to 0.29, release by release (lmi_compat)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from lmi_core.errors import EngineError, UserError
from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.base import Call, ParsedCall
from lmi_server.dialects.lmi.errors import lmi_error
from lmi_server.dialects.lmi.lmi import parse_invocation
from lmi_server.dialects.lmi.options import LmiOptions
from lmi_server.dialects.lmi.release import Release
from lmi_server.dialects.unknown_fields import IGNORED_HEADER
from lmi_server.http.options import ServerOptions
from tests.server.configured import options_of
from tests.server.dialects.lmi.test_lmi_formats import render
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Answer, serving
from tests.server.parsing import model_of

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEMPLATE = ChatTemplate({"default": "{{ messages[0].content }}"})
RELEASES = ("0.24", "0.25", "0.26", "0.27", "0.28", "0.29")


def parse(release: str, body: dict[str, Any], **options: Any) -> ParsedCall:
    chosen = replace(options_of(f"lmi_compat={release}").lmi, **options)
    call = Call(request_id="r", body=json.dumps(body).encode(), content_type="application/json")
    parsed = parse_invocation(model_of(lmi=chosen, chat_template=TEMPLATE), call)
    if hasattr(parsed.renderer, "_created"):
        parsed.renderer._created = 1711997860
    return parsed


def bytes_of(release: str, engine: FakeEngine | None = None, **body: Any) -> str:
    options = {"output_formatter": body.pop("formatter", None)}
    return render(parse(release, body, **options), engine).decode()


def asked(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "He is", "parameters": {"max_new_tokens": 2, **parameters}}


FIRST = '{"id": 0, "text": " a", "log_prob": -0.5}'
SECOND = '{"id": 1, "text": " fox", "log_prob": -0.5}'
HEAD = '{"generated_text": " a fox"'


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("0.24", HEAD + "}"),
        ("0.25", HEAD + "}"),
        (
            "0.26",
            HEAD + ', "details": {"finish_reason": "length", "tokens": '
            '[{"text": " a", "log_prob": -0.5}, ' + SECOND + "]}}",
        ),
        (
            "0.27",
            HEAD + ', "details": {"finish_reason": "length", "generated_tokens": 2, '
            '"inputs": "He is", "tokens": [{"id": [0], "text": " a", "log_prob": -0.5}, '
            '{"id": [1], "text": " fox", "log_prob": -0.5}]}}',
        ),
        (
            "0.28",
            HEAD + ', "details": {"finish_reason": "length", "generated_tokens": 2, '
            f'"inputs": "He is", "tokens": [{FIRST}, {SECOND}], "prefill": '
            '[{"id": 0, "text": "He", "log_prob": null}, '
            '{"id": 1, "text": "is", "log_prob": -1.5}]}}',
        ),
        (
            "0.29",
            HEAD + ', "details": {"finish_reason": "length", "generated_tokens": 2, '
            f'"inputs": "He is", "tokens": [{FIRST}, {SECOND}], "prefill": '
            '[{"id": 0, "text": "He", "log_prob": null}, '
            '{"id": 1, "text": "is", "log_prob": -1.5}], "top_tokens": '
            '[[{"id": 0, "text": "t0", "log_prob": -0.5}], '
            '[{"id": 1, "text": "t0", "log_prob": -0.5}]]}}',
        ),
    ],
)
def test_json_details(release: str, expected: str) -> None:
    body = asked(details=True, decoder_input_details=True, top_n_tokens=1)
    assert bytes_of(release, **body) == expected


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("0.24", '{"outputs": [" a"]}\n{"outputs": [" fox"]}\n'),
        ("0.25", '{"outputs": [" a"]}\n{"outputs": [" fox"]}\n'),
        (
            "0.26",
            '{"token": {"text": " a", "log_prob": -0.5}}\n'
            f'{{"token": {SECOND}, "generated_text": " a fox", '
            '"details": {"finish_reason": "length"}}\n',
        ),
        (
            "0.27",
            '{"token": {"id": [0], "text": " a", "log_prob": -0.5}}\n'
            '{"token": {"id": [1], "text": " fox", "log_prob": -0.5}, "generated_text": " a fox", '
            '"details": {"finish_reason": "length", "generated_tokens": 2, "inputs": "He is"}}\n',
        ),
        *(
            (
                release,
                f'{{"token": {FIRST}}}\n{{"token": {SECOND}, "generated_text": " a fox", '
                '"details": {"finish_reason": "length", "generated_tokens": 2, '
                '"inputs": "He is"}}\n',
            )
            for release in ("0.28", "0.29")
        ),
    ],
)
def test_lines(release: str, expected: str) -> None:
    assert bytes_of(release, formatter="jsonlines", **asked(details=True)) == expected


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("0.26", {"id": 7, "text": " end", "log_prob": -0.5, "special_token": True}),
        ("0.27", {"id": [7], "text": " end", "log_prob": -0.5, "special_token": True}),
        ("0.28", {"id": 7, "text": " end", "log_prob": -0.5, "special_token": True}),
    ],
)
def test_special_tokens(release: str, expected: dict[str, Any]) -> None:
    body = asked(max_new_tokens=8)
    lines = bytes_of(release, formatter="jsonlines", **body).splitlines()
    assert json.loads(lines[-1])["token"] == expected


def test_what_a_release_omits_from_tokens() -> None:
    """0.26 and 0.27 leave out what is empty; 0.28 always has its three keys."""
    events = {"token_id": 0, "text": "", "logprob": None}
    tokens = {}
    for release in ("0.26", "0.27", "0.28"):
        parsed = parse(release, asked(), output_formatter="jsonlines")
        engine = FakeEngine()

        async def first(parsed: ParsedCall = parsed, engine: FakeEngine = engine) -> bytes:
            async for batch in engine.generate_batches(parsed.requests[0]):
                return parsed.renderer.feed(0, [replace(batch[0], **events)])
            return b""

        tokens[release] = json.loads(asyncio.run(first()))["token"]
    assert tokens == {
        "0.26": {},
        "0.27": {"id": [0]},
        "0.28": {"id": 0, "text": "", "log_prob": None},
    }


@pytest.mark.parametrize("release", RELEASES)
def test_when_a_request_streams(release: str) -> None:
    parsed = parse(release, {**asked(), "stream": True})
    expected = "application/json" if release < "0.27" else "application/jsonlines"
    assert parsed.renderer.content_type == expected
    parsed = parse(release, asked(output_formatter="jsonlines"))
    assert parsed.renderer.content_type == expected


@pytest.mark.parametrize(
    ("release", "ignored"),
    [
        ("0.24", "details, return_full_text, decoder_input_details, top_n_tokens"),
        ("0.26", "return_full_text, decoder_input_details, top_n_tokens"),
        ("0.27", "decoder_input_details, top_n_tokens"),
        ("0.28", "top_n_tokens"),
        ("0.29", None),
    ],
)
def test_later_parameters_are_ignored_and_named(release: str, ignored: str | None) -> None:
    body = asked(details=True, return_full_text=True, decoder_input_details=True, top_n_tokens=1)
    assert parse(release, body).renderer.headers.get(IGNORED_HEADER) == ignored


PRETTY = '{\n  "code": 424,\n  "error": "TEXT"\n}'
COMPACT = '{"code":424,"error":"TEXT"}'
USER_TEXT = "The prompt has 5000 tokens and max_new_tokens is 30; together at most 4096 fit"
STEP_TEXT = "step 7 failed: no such kernel"


async def failing(release: str, body: Any, **engine: Any) -> Answer:
    options = LmiOptions(release=Release.parse(release))
    async with serving(FakeEngine(**engine), lmi=options, chat_template=TEMPLATE) as served:
        return await served.post(body)


@pytest.mark.parametrize(
    ("release", "status", "expected"),
    [
        ("0.24", 424, '{"code": 424, "error": "TEXT"}'),
        ("0.25", 200, PRETTY),
        ("0.26", 200, PRETTY),
        ("0.27", 200, COMPACT),
        ("0.28", 200, COMPACT),
        ("0.29", 424, COMPACT),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_request_errors(release: str, status: int, expected: str, stream: bool) -> None:
    answer = asyncio.run(failing(release, {"inputs": "a " * 5000, "stream": stream}))
    assert (answer.status, answer.body.decode()) == (status, expected.replace("TEXT", USER_TEXT))
    assert answer.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("release", "status", "expected"),
    [
        ("0.24", 500, '{"code": 500, "error": "TEXT"}'),
        ("0.25", 200, PRETTY),
        ("0.27", 200, COMPACT),
        ("0.28", 200, '{"generated_text": " a", "details": {"finish_reason": "error"}}'),
        ("0.29", 424, COMPACT),
    ],
)
def test_a_failed_step(release: str, status: int, expected: str) -> None:
    answer = asyncio.run(failing(release, asked(), fail_after=1))
    assert (answer.status, answer.body.decode()) == (status, expected.replace("TEXT", STEP_TEXT))


def test_a_failed_step_with_details_in_0_28() -> None:
    answer = asyncio.run(failing("0.28", asked(details=True), fail_after=1))
    assert answer.body.decode() == (
        '{"generated_text": " a", "details": {"finish_reason": "error", "generated_tokens": 1, '
        f'"inputs": "He is", "tokens": [{FIRST}, '
        '{"id": -1, "text": "", "log_prob": -1, "special_token": true}]}}'
    )


FAILED_LINE = (
    '{"token": {"id": -1, "text": "", "log_prob": -1, "special_token": true}, '
    '"generated_text": "SOFAR", "details": {"finish_reason": "error"}}\n'
)


@pytest.mark.parametrize(
    ("release", "fail_after", "status", "expected"),
    [
        ("0.27", 0, 200, COMPACT),
        ("0.27", 1, 200, '{"token": {"id": [0], "text": " a", "log_prob": -0.5}}\n' + COMPACT),
        ("0.28", 0, 200, FAILED_LINE.replace("SOFAR", "")),
        ("0.28", 1, 200, f'{{"token": {FIRST}}}\n' + FAILED_LINE.replace("SOFAR", " a")),
        ("0.29", 1, 200, f'{{"token": {FIRST}}}\n' + COMPACT),
    ],
)
def test_a_failed_step_of_a_stream(
    release: str, fail_after: int, status: int, expected: str
) -> None:
    body = {**asked(), "stream": True}
    answer = asyncio.run(failing(release, body, fail_after=fail_after))
    assert (answer.status, answer.body.decode()) == (status, expected.replace("TEXT", STEP_TEXT))


@pytest.mark.parametrize(("release", "code"), [("0.24", 500), ("0.26", 424)])
def test_a_failed_step_of_configured_lines(release: str, code: int) -> None:
    """Its text is never left out, although those releases lost it from 0.25 on."""
    body = bytes_of(release, FakeEngine(fail_after=1), formatter="jsonlines", **asked())
    error = json.loads(body.split("\n", 1)[1])
    assert error == {"code": code, "error": STEP_TEXT}


CHAT_HEAD = '{"id": "chatcmpl-r", "object": "chat.completion", "created": 1711997860, "choices": '
CHUNK_HEAD = CHAT_HEAD.replace("completion", "completion.chunk")
CHUNK = CHUNK_HEAD + '[{"index": 0, "delta": DELTA, "logprobs": null, "finish_reason": REASON}]}\n'


@pytest.mark.parametrize("release", ["0.27", "0.28", "0.29"])
def test_chat(release: str) -> None:
    assert bytes_of(release, **CHAT) == (
        CHAT_HEAD + '[{"index": 0, "message": {"role": "assistant", "content": " a fox"}, '
        '"logprobs": null, "finish_reason": "length"}], '
        '"usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}'
    )


@pytest.mark.parametrize("release", ["0.27", "0.28", "0.29"])
def test_chat_lines(release: str) -> None:
    first = CHUNK.replace("DELTA", '{"content": " a", "role": "assistant"}')
    last = CHUNK.replace("DELTA", '{"content": " fox"}').replace("REASON", '"length"')
    assert bytes_of(release, **CHAT, stream=True) == first.replace("REASON", "null") + last


def test_chat_logprobs_need_top_logprobs() -> None:
    assert json.loads(bytes_of("0.28", **CHAT, logprobs=True))["choices"][0]["logprobs"] is None
    asked = {**CHAT, "max_tokens": 1, "logprobs": True, "top_logprobs": 2}
    entry = {"token": " a", "logprob": -0.5, "bytes": [32, 97]}
    assert json.loads(bytes_of("0.28", **asked))["choices"][0]["logprobs"] == {
        "content": [{**entry, "top_logprobs": [entry]}]
    }
    chunk = json.loads(bytes_of("0.28", **asked, stream=True))
    assert chunk["choices"][0]["logprobs"] == [
        {"content": [{**entry, "top_logprobs": [{**entry, "token": -0.5}]}]}
    ]


def test_a_failed_step_of_a_chat() -> None:
    answer = asyncio.run(failing("0.28", CHAT, fail_after=1))
    choice = json.loads(answer.body)["choices"][0]
    assert (answer.status, choice["finish_reason"]) == (200, "error")
    assert choice["message"]["content"] == " a"
    answer = asyncio.run(failing("0.28", {**CHAT, "stream": True}, fail_after=1))
    lines = [json.loads(line)["choices"][0] for line in answer.body.splitlines()]
    assert [line["finish_reason"] for line in lines] == [None, "error"]
    answer = asyncio.run(failing("0.29", CHAT, fail_after=1))
    assert (answer.status, answer.body.decode()) == (424, COMPACT.replace("TEXT", STEP_TEXT))


def test_chat_came_with_0_27() -> None:
    with pytest.raises(UserError, match=r"messages came with LMI 0[.]27"):
        parse("0.26", CHAT)


@pytest.mark.parametrize("options", [{"tgi_compat": True}, {"output_formatter": "sse"}])
def test_what_came_later_is_refused_at_start(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"came with LMI 0[.]28, but option[.]lmi_compat is 0[.]27"):
        LmiOptions(release=Release.V0_27, **options)
    LmiOptions(release=Release.V0_28, **options)


def test_unknown_releases_are_refused() -> None:
    with pytest.raises(UserError, match=r"'0[.]30'; allowed are 0[.]24"):
        Release.parse("0.30")


def test_errors_of_the_server_itself_keep_their_form() -> None:
    options = ServerOptions(lmi=LmiOptions(release=Release.V0_26))
    reply = lmi_error(RuntimeError("incident 7"), options)
    assert (reply.status, json.loads(reply.body)["type"]) == (500, "InternalServerException")
    assert lmi_error(EngineError("x"), options).status == 200
