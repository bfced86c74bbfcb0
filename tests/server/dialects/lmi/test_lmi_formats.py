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
from lmi_server.dialects.lmi.lmi import LmiOptions, LmiProtocol
from lmi_server.dialects.unknown_fields import IGNORED_HEADER
from tests.server.configured import options_of
from tests.server.fake_engine import FakeEngine


def parse(
    body: dict[str, Any] | bytes,
    content_type: str = "application/json",
    settings: tuple[str, ...] = (),
    **options,
) -> ParsedCall:
    """What an option of the protocol, or a key of the configuration, makes of a body."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    protocol = LmiProtocol("model", replace(options_of(*settings).lmi, **options))
    return protocol.parse(Call(request_id="r", body=raw, content_type=content_type))


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
    protocol = LmiProtocol("m")
    reply = protocol.error(UserError("inputs is empty"))
    assert (reply.status, reply.body) == (424, b'{"code":424,"error":"inputs is empty"}')
    assert protocol.error(EngineError("x")).status == 424
    reply = protocol.error(CapacityError("5 of 5 wait", retry_after_s=2.0))
    assert reply.status == 503
    assert reply.headers == {"Retry-After": "2"}
    assert reply.body == (
        b'{\n  "code": 503,\n  "type": "WlmCapacityException",\n'
        b'  "message": "Worker queue capacity exceeded for model: m (5 of 5 wait)"\n}\n'
    )
    reply = protocol.error(HttpError(413, "PayloadTooLargeException", "too long"))
    assert (reply.status, reply.body, reply.close) == (413, b"", True)


def test_defaults() -> None:
    params = parse({"inputs": "x"}).requests[0].params
    assert (params.max_new_tokens, params.temperature, params.n) == (30, 0.0, 1)


@pytest.mark.parametrize(
    ("values", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0}, 0.0),
        ({"top_p": 0.9}, 1.0),
        ({"typical_p": 0.9}, 1.0),
        ({"temperature": None, "top_k": None}, 0.0),
    ],
)
def test_when_a_request_samples(values: dict[str, Any], temperature: float) -> None:
    assert parse(parameters(**values)).requests[0].params.temperature == temperature


def test_every_parameter_arrives() -> None:
    params = (
        parse(
            parameters(
                do_sample=True,
                seed="42",
                top_k=-1,
                top_p=0.5,
                min_p=0.1,
                typical_p=0.8,
                repetition_penalty=1.1,
                presence_penalty=0.2,
                frequency_penalty=0.3,
                stop_sequences=["x"],
                stop="y",
                stop_token_ids=[5],
                min_tokens=2,
                ignore_eos_token=True,
                include_stop_str_in_output=True,
                skip_special_tokens=False,
                details=True,
                logprobs=4,
            )
        )
        .requests[0]
        .params
    )
    assert (params.seed, params.top_k, params.top_p, params.min_p) == (42, 0, 0.5, 0.1)
    assert params.typical_p == 0.8
    assert (params.repetition_penalty, params.presence_penalty) == (1.1, 0.2)
    assert (params.frequency_penalty, params.min_new_tokens) == (0.3, 2)
    assert (params.stop, params.stop_token_ids) == (("x", "y"), (5,))
    assert (params.ignore_eos, params.include_stop, params.skip_special_tokens) == (
        True,
        True,
        False,
    )
    assert params.logprobs == 4


def test_logprobs_are_computed_only_when_shown() -> None:
    assert parse(parameters()).requests[0].params.logprobs is None
    assert parse({**parameters(), "stream": True}).requests[0].params.logprobs == 0


def test_unknown_parameters_are_dropped_and_named() -> None:
    parsed = parse(parameters(no_such=1, **{"x\r\ny": 2}))
    assert parsed.headers == {IGNORED_HEADER: "no_such"}


def test_fields_at_the_wrong_place_are_ignored_and_named() -> None:
    parsed = parse({**parameters(no_such=1), "max_new_tokens": 3, "details": True})
    assert parsed.headers == {IGNORED_HEADER: "details, max_new_tokens, no_such"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"inputs":', "not valid JSON"),
        (b'{"inputs": "\xff"}', "not valid UTF-8: byte 12 is invalid"),
        (b'{"inputs": "a"} x', "trailing characters"),
        (b'{"inputs": "a", "parameters": {"x": ' + b"[" * 100_000, "nested too deeply"),
        (b"[]", "the body must be object, got array"),
        ({}, "needs the field inputs"),
        ({"inputs": ""}, "inputs is empty"),
        ({"inputs": []}, "inputs is empty"),
        ({"inputs": ["a"] * 257}, "at most 256"),
        ({"inputs": 3}, "inputs must be str | array | null, got int"),
        ({"inputs": "a", "stream": "yes"}, "stream must be bool"),
        ({"inputs": "a", "parameters": []}, "parameters must be object"),
        (parameters(top_k="3"), "parameters.top_k must be int | null, got str"),
        (parameters(stop_token_ids=["x"]), "parameters.stop_token_ids[0] must be int, got str"),
        (parameters(seed="x"), "parameters.seed must be an integer, got 'x'"),
        (parameters(temperature=-1), "parameters.temperature must be at least 0, got -1"),
        (parameters(logprobs=-1), "parameters.logprobs must be at least 0, got -1"),
        (parameters(top_n_tokens=-2), "parameters.top_n_tokens must be at least 0, got -2"),
        (parameters(min_tokens=4), "min_tokens must be between 0 and max_new_tokens (3), got 4"),
        (parameters(min_tokens=-1), "parameters.min_tokens must be between 0 and"),
        (parameters(truncate=0), "parameters.truncate must be at least 1, got 0"),
        (parameters(n=0), "n must be between 1 and 128"),
        (parameters(n=3, best_of=2), "parameters.best_of must be between n (3) and 128, got 2"),
        (parameters(best_of=129), "parameters.best_of must be between 1 and 128, got 129"),
        (parameters(n=1, best_of=129), "parameters.best_of must be between n (1) and 128, got 129"),
        ({**parameters(n=2), "stream": True}, "only one sequence can be streamed"),
        ({**parameters(n=1, best_of=2), "stream": True}, "best_of is 2, but only one sequence can"),
        ({"inputs": ["a", "b"], "stream": True}, "only one can be streamed"),
        ({"inputs": "a", "adapters": "french"}, "'french'"),
        (parameters(decoding_strategy="beams"), "must be greedy, sample or contrastive, got"),
        (parameters(min_new_tokens=4), "min_new_tokens must be between 0 and max_new_tokens (3)"),
        (parameters(min_new_tokens=-1), "min_new_tokens must be at least 0, got -1"),
        (parameters(min_length=5), "min_length must be between 0 and max_new_tokens (3), got 5"),
        (parameters(no_repeat_ngram_size=-1), "no_repeat_ngram_size must be at least 0, got -1"),
        (parameters(logit_bias={"x": 1}), "logit_bias has the keys 'x'; keys are token ids"),
        (parameters(num_beams=129), "parameters.num_beams must be between 1 and 128, got 129"),
        (parameters(num_return_sequences=0), "parameters.num_return_sequences must be between 1"),
        (parameters(num_beams=4, best_of=3), "parameters.best_of is 3, but parameters.num_beams"),
        ({**parameters(num_beams=4), "stream": True}, "only one sequence can be streamed"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": "x"}]}, "has no chat template"),
    ],
)
def test_bad_bodies(body: dict[str, Any] | bytes, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(body)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spaces_between_special_tokens", False),
    ],
)
def test_parameters_without_a_mechanism_are_refused(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"parameters.{name} is not available in this version"):
        parse(parameters(**{name: value}))


def test_neutral_values_of_those_are_accepted() -> None:
    parse(parameters(num_beams=1, watermark=False, spaces_between_special_tokens=True))


def test_bans_and_biases_by_their_names() -> None:
    names = {"bad_words": ["a"], "bad_sequences": ["b"], "bad_words_ids": [[1, 2]]}
    asked = parameters(
        **names, min_length=1, min_new_tokens=2, no_repeat_ngram_size=3, logit_bias={"7": -1.5}
    )
    params = parse(asked).requests[0].params
    assert (params.bad_words, params.bad_words_ids) == (("a", "b"), ((1, 2),))
    assert (params.min_new_tokens, params.no_repeat_ngram_size) == (2, 3)
    assert params.logit_bias == ((7, -1.5),)


def test_watermarks() -> None:
    options = {"watermark_gamma": 0.25, "watermark_delta": 3.0}
    params = parse(parameters(watermark=True), **options).requests[0].params
    assert (params.watermark_gamma, params.watermark_delta) == (0.25, 3.0)
    assert parse(parameters(), **options).requests[0].params.watermark_delta == 0.0


@pytest.mark.parametrize("inside", [False, True])
def test_a_cached_prompt_comes_first_where_it_is_to_be_cached(inside: bool) -> None:
    def ask(**more: Any) -> ParsedCall:
        body = parameters(**more)
        (body["parameters"] if inside else body)["cached_prompt"] = "Once "
        return parse({**body, "inputs": "upon"})

    assert ask(use_lru_kv_cache=True).requests[0].prompt == "Once upon"
    ignored = ask()
    assert ignored.requests[0].prompt == "upon"
    assert ignored.headers[IGNORED_HEADER] == "cached_prompt"


@pytest.mark.parametrize(
    ("asked", "beams", "n"),
    [
        ({"num_beams": 4}, 4, 4),
        ({"num_beams": 4, "n": 2}, 4, 2),
        ({"num_beams": 4, "num_return_sequences": 1}, 4, 1),
        ({"use_beam_search": True, "best_of": 3}, 3, 3),
        ({"use_beam_search": True, "best_of": 3, "n": 2}, 3, 2),
        ({"use_beam_search": True, "n": 2}, 2, 2),
        ({"use_beam_search": True}, 1, 1),
    ],
)
def test_beams(asked: dict[str, Any], beams: int, n: int) -> None:
    more = {"length_penalty": 0.5, "early_stopping": "never"}
    params = parse(parameters(**asked, **more)).requests[0].params
    assert (params.num_beams, params.n) == (beams, n)
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")


def test_content_types() -> None:
    assert parse(b"Once upon", "text/plain; charset=utf-8").requests[0].prompt == "Once upon"
    body = b'{"inputs": "a"}'
    assert parse(body, "").requests[0].prompt == "a"
    assert parse(body, "application/x-www-form-urlencoded").requests[0].prompt == "a"
    with pytest.raises(UserError, match="image/png"):
        parse(b"\x89PNG", "image/png")
    with pytest.raises(UserError, match="byte 1"):
        parse(b"a\xff", "text/plain")


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
        protocol = LmiProtocol("model", LmiOptions(statuses=statuses))
        reply = protocol.error(error)
        assert (reply.status, json.loads(reply.body)["code"]) == (expected, expected)
