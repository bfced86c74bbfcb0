"""The exact bytes of LMI's formats, from a request body to the response body."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from lmi_core.errors import CapacityError, EngineError, UserError
from lmi_server.dialects.base import Call, HttpError, ParsedCall
from lmi_server.dialects.lmi.errors import lmi_error
from lmi_server.dialects.lmi.lmi import parse_invocation
from lmi_server.dialects.lmi.options import LmiOptions
from lmi_server.http.options import ServerOptions
from tests.server.configured import options_of
from tests.server.fake_engine import FakeEngine
from tests.server.parsing import model_of


def parse(
    body: dict[str, Any] | bytes,
    content_type: str = "application/json",
    settings: tuple[str, ...] = (),
    **options,
) -> ParsedCall:
    """What an option of the protocol, or a key of the configuration, makes of a body."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    model = model_of("model", lmi=replace(options_of(*settings).lmi, **options))
    return parse_invocation(model, Call(request_id="r", body=raw, content_type=content_type))


def render(parsed: ParsedCall, engine: FakeEngine | None = None) -> bytes:
    async def run() -> bytes:
        body = b""
        for index, request in enumerate(parsed.requests):
            async with aclosing((engine or FakeEngine()).generate_batches(request)) as batches:
                try:
                    async for events in batches:
                        body += parsed.renderer.feed(index, events)
                except EngineError as error:
                    return body + parsed.renderer.error(error)
        return body + parsed.renderer.finish()

    return asyncio.run(run())


def bytes_of(body: dict[str, Any], **options: Any) -> bytes:
    return render(parse(body, **options))


def parameters(**values: Any) -> dict[str, Any]:
    return {"inputs": "He is", "parameters": {"max_new_tokens": 3, **values}}


def test_json() -> None:
    assert bytes_of(parameters()) == b'{"generated_text": " a fox \\"quoted\\""}'


def test_json_keeps_non_ascii() -> None:
    expected = '{"generated_text": " a fox \\"quoted\\"\\n é 漢字 back\\\\slash"}'
    assert bytes_of(parameters(max_new_tokens=7)) == expected.encode()


def test_json_full_text_is_escaped() -> None:
    body = {"inputs": 'Say "x"\n', "parameters": {"max_new_tokens": 1, "return_full_text": True}}
    assert bytes_of(body) == b'{"generated_text": "Say \\"x\\"\\n a"}'


def test_json_details() -> None:
    assert bytes_of(parameters(max_new_tokens=2, details=True)) == (
        b'{"generated_text": " a fox", "details": {"finish_reason": "length", '
        b'"generated_tokens": 2, "inputs": "He is", "tokens": ['
        b'{"id": 0, "text": " a", "log_prob": -0.5}, {"id": 1, "text": " fox", "log_prob": -0.5}]}}'
    )


def test_json_prefill_and_top_tokens() -> None:
    body = parameters(max_new_tokens=1, details=True, decoder_input_details=True, top_n_tokens=2)
    assert bytes_of(body) == (
        b'{"generated_text": " a", "details": {"finish_reason": "length", "generated_tokens": 1, '
        b'"inputs": "He is", "tokens": [{"id": 0, "text": " a", "log_prob": -0.5}], '
        b'"prefill": [{"id": 0, "text": "He", "log_prob": null}, '
        b'{"id": 1, "text": "is", "log_prob": -1.5}], '
        b'"top_tokens": [[{"id": 0, "text": "t0", "log_prob": -0.5}, '
        b'{"id": 1, "text": "t1", "log_prob": -1.5}]]}}'
    )


def test_json_several_sequences_best_first() -> None:
    assert bytes_of(parameters(max_new_tokens=1, n=2, do_sample=True)) == (
        b'{"generated_text": " fox", "details": {"inputs": "He is", "finish_reason": "length", '
        b'"generated_tokens": 1, "tokens": [{"id": 1, "text": " fox", "log_prob": -0.25}], '
        b'"best_of_sequences": [{"finish_reason": "length", "generated_tokens": 1, '
        b'"tokens": [{"id": 0, "text": " a", "log_prob": -0.5}], "generated_text": " a"}]}}'
    )


def test_json_without_n_returns_all_of_best_of() -> None:
    asked = {"max_new_tokens": 1, "do_sample": True}
    assert bytes_of(parameters(best_of=2, **asked)) == bytes_of(parameters(n=2, **asked))


def test_json_best_of_more_sequences() -> None:
    """The scripted engine's later choices are the likelier ones."""
    asked = {"max_new_tokens": 1, "do_sample": True, "best_of": 4}
    assert json.loads(bytes_of(parameters(n=1, **asked))) == {"generated_text": "\n"}
    answer = json.loads(bytes_of(parameters(n=2, **asked)))
    assert answer["generated_text"] == "\n"
    [other] = answer["details"]["best_of_sequences"]
    assert other["generated_text"] == ' "quoted"'
    details = json.loads(bytes_of(parameters(n=1, details=True, **asked)))["details"]
    assert details["tokens"] == [{"id": 3, "text": "\n", "log_prob": -0.125}]


def test_json_list_of_prompts() -> None:
    body = {"inputs": ["a", "b"], "parameters": {"max_new_tokens": 1}}
    assert bytes_of(body) == b'[{"generated_text": " a"}, {"generated_text": " a"}]'


def test_special_token_is_marked() -> None:
    tokens = json.loads(bytes_of(parameters(max_new_tokens=8, details=True)))["details"]["tokens"]
    assert tokens[-1] == {"id": 7, "text": " end", "log_prob": -0.5, "special_token": True}
    assert "special_token" not in tokens[0]


def test_jsonlines() -> None:
    assert bytes_of({**parameters(max_new_tokens=2), "stream": True}) == (
        b'{"token": {"id": 0, "text": " a", "log_prob": -0.5}}\n'
        b'{"token": {"id": 1, "text": " fox", "log_prob": -0.5}, "generated_text": " a fox"}\n'
    )


def test_jsonlines_details() -> None:
    last = bytes_of({**parameters(details=True), "stream": True}).splitlines()[-1]
    assert last == (
        b'{"token": {"id": 2, "text": " \\"quoted\\"", "log_prob": -0.5}, '
        b'"generated_text": " a fox \\"quoted\\"", "details": {"finish_reason": "length", '
        b'"generated_tokens": 3, "inputs": "He is"}}'
    )


def test_jsonlines_equals_json_module() -> None:
    """Frames are put together by hand; they must be what json.dumps would write."""
    for line in (
        bytes_of({**parameters(max_new_tokens=9, details=True), "stream": True})
        .decode()
        .splitlines()
    ):
        assert json.dumps(json.loads(line), ensure_ascii=False) == line


def test_jsonlines_merges_what_is_ready() -> None:
    parsed = parse({**parameters(max_new_tokens=4), "stream": True})
    one_by_one = render(parse({**parameters(max_new_tokens=4), "stream": True}))
    assert render(parsed, FakeEngine(batch_size=4)) == one_by_one


def test_sse() -> None:
    assert bytes_of(parameters(max_new_tokens=2, output_formatter="sse")) == (
        b'data: {"token": {"id": 0, "text": " a", "log_prob": -0.5}}\n\n'
        b'data: {"token": {"id": 1, "text": " fox", "log_prob": -0.5}, '
        b'"generated_text": " a fox"}\n\n'
    )


def test_tgi_compat() -> None:
    assert bytes_of(parameters(max_new_tokens=1), settings=("tgi_compat=true",)) == (
        b'[{"generated_text": " a", "details": {"finish_reason": "length", "generated_tokens": 1, '
        b'"inputs": "He is", "tokens": '
        b'[{"id": 0, "text": " a", "logprob": -0.5, "special": false}]}}]'
    )
    assert bytes_of(
        {**parameters(max_new_tokens=1), "stream": True}, settings=("tgi_compat=true",)
    ) == (
        b'data: {"token": {"id": 0, "text": " a", "logprob": -0.5, "special": false}, '
        b'"generated_text": " a", "details": {"finish_reason": "length", "generated_tokens": 1, '
        b'"inputs": "He is"}}\n\n'
    )


@pytest.mark.parametrize(
    ("stream", "asked", "configured", "content_type"),
    [
        (False, None, None, "application/json"),
        (True, None, None, "application/jsonlines"),
        (True, "json", None, "application/json"),
        (False, "jsonlines", None, "application/jsonlines"),
        (False, "sse", None, "text/event-stream"),
        (True, "no_such", None, "application/jsonlines"),
        (True, "sse", "json", "application/json"),
    ],
)
def test_formatter_choice(
    stream: bool, asked: str | None, configured: str | None, content_type: str
) -> None:
    body = {**parameters(output_formatter=asked), "stream": stream}
    settings = () if configured is None else (f"output_formatter={configured}",)
    assert parse(body, settings=settings).renderer.content_type == content_type


def test_error_in_mid_stream() -> None:
    body = {**parameters(), "stream": True}
    assert render(parse(body), FakeEngine(fail_after=1)) == (
        b'{"token": {"id": 0, "text": " a", "log_prob": -0.5}}\n'
        b'{"code":424,"error":"step 7 failed: no such kernel"}'
    )


def test_error_in_mid_sse_is_an_event() -> None:
    body = parameters(output_formatter="sse")
    assert render(parse(body), FakeEngine(fail_after=1)).endswith(
        b'data: {"code":424,"error":"step 7 failed: no such kernel"}\n\n'
    )


def test_errors_before_the_body() -> None:
    options = ServerOptions(model_name="m")
    reply = lmi_error(UserError("inputs is empty"), options)
    assert (reply.status, reply.body) == (424, b'{"code":424,"error":"inputs is empty"}')
    assert lmi_error(EngineError("x"), options).status == 424
    reply = lmi_error(CapacityError("5 of 5 wait", retry_after_s=2.0), options)
    assert reply.status == 503
    assert reply.headers == {"Retry-After": "2"}
    assert reply.body == (
        b'{\n  "code": 503,\n  "type": "WlmCapacityException",\n'
        b'  "message": "Worker queue capacity exceeded for model: m (5 of 5 wait)"\n}\n'
    )
    reply = lmi_error(HttpError(413, "PayloadTooLargeException", "too long"), options)
    assert (reply.status, reply.body, reply.close) == (413, b"", True)


@pytest.mark.parametrize(
    ("error", "name", "status"),
    [
        (HttpError(400, "BadRequestException", "x"), "bad_request", 400),
        (HttpError(503, "WlmException", "x"), "wlm_error", 503),
        (CapacityError("x"), "throttle_error", 503),
        (RuntimeError("x"), "server_error", 500),
    ],
)
def test_configured_statuses(error: Exception, name: str, status: int) -> None:
    for statuses, expected in (({}, status), ({name: 207}, 207)):
        reply = lmi_error(error, ServerOptions(lmi=LmiOptions(statuses=statuses)))
        assert (reply.status, json.loads(reply.body)["code"]) == (expected, expected)
