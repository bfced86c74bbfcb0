"""TGI's checks: every message, and which of two faults is reported."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.tgi.grammar import grammar_of
from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.dialects.tgi.schema import GenerateParameters
from lmi_server.dialects.tgi.tgi import check_content_type, decode_compat, decode_generate
from lmi_server.dialects.tgi.v1_schema import decode_completion
from lmi_server.dialects.tgi.validation import (
    Limits,
    check_best_of,
    check_inputs,
    check_lengths,
    check_parameters,
)

OPTIONS = TgiOptions()
LIMITS = Limits(max_input=7, max_total=10)

FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"temperature": 0.0}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": -1.0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.5}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 0.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"seed": 1}, "`seed` must not be set when `best_of` > 1"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
]
"""In the order of the checks; the seed is a fault only next to best_of."""


def message_of(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_the_first_fault_is_reported(number: int) -> None:
    values: dict[str, Any] = {}
    for fault, _ in reversed(FAULTS[number:]):
        values |= fault
    if number == 0:  # which values that sample, right or wrong, would make no fault
        values = {name: values[name] for name in ("best_of", "repetition_penalty", "seed")}
    if number == 9:
        values |= {"best_of": 2, "do_sample": True}
    expected = FAULTS[number][1]
    assert message_of(check_parameters, GenerateParameters(**values), OPTIONS) == expected


def test_values_that_pass() -> None:
    parameters = GenerateParameters(
        best_of=2,
        top_k=1,
        top_p=0.5,
        temperature=0.1,
        frequency_penalty=-2.0,
        stop=["a"] * 4,
        top_n_tokens=5,
    )
    check_parameters(parameters, OPTIONS)


@pytest.mark.parametrize(
    ("values", "streams", "max_best_of", "message"),
    [
        ({"best_of": 2}, False, 1, "`best_of` != 1 is not allowed for this endpoint"),
        ({"best_of": 3}, False, 2, "`best_of` must be > 0 and <= 2. Given: 3"),
        ({"best_of": 2}, True, 2, "`best_of` != 1 is not supported when streaming tokens"),
        ({"best_of": 0}, True, 2, "`best_of` != 1 is not supported when streaming tokens"),
        (
            {"decoder_input_details": True},
            True,
            2,
            "`decoder_input_details` == true is not supported when streaming tokens",
        ),
    ],
)
def test_checks_before_admission(
    values: dict[str, Any], streams: bool, max_best_of: int, message: str
) -> None:
    parameters, options = GenerateParameters(**values), TgiOptions(max_best_of=max_best_of)
    assert message_of(check_best_of, parameters, options, streams=streams) == message


@pytest.mark.parametrize(("best_of", "expected"), [(None, 1), (0, 1), (2, 2)])
def test_number_of_sequences(best_of: int | None, expected: int) -> None:
    parameters = GenerateParameters(best_of=best_of)
    assert check_best_of(parameters, OPTIONS, streams=False) == expected


@pytest.mark.parametrize(
    ("inputs", "truncate", "message"),
    [
        ("", None, "`inputs` cannot be empty"),
        ("a", 0, "`truncate` must be strictly positive and less than 7. Given: 0"),
        ("a", 8, "`truncate` must be strictly positive and less than 7. Given: 8"),
    ],
)
def test_inputs(inputs: str, truncate: int | None, message: str) -> None:
    parameters = GenerateParameters(truncate=truncate)
    assert message_of(check_inputs, inputs, parameters, LIMITS) == message


def test_lengths() -> None:
    def lengths(num_tokens: int, version: int = 2, **values: Any) -> Any:
        return check_lengths(range(num_tokens), GenerateParameters(**values), LIMITS, version)

    assert message_of(lengths, 6, max_new_tokens=5) == (
        "`inputs` tokens + `max_new_tokens` must be <= 10. "
        "Given: 6 `inputs` tokens and 5 `max_new_tokens`"
    )
    assert message_of(lengths, 3) == (
        "`inputs` tokens + `max_new_tokens` must be <= 10. "
        "Given: 3 `inputs` tokens and 100 `max_new_tokens`"
    )
    assert message_of(lengths, 8, max_new_tokens=2) == (
        "`inputs` must have less than 7 tokens. Given: 8"
    )
    assert message_of(lengths, 8, max_new_tokens=None) == (
        "`inputs` must have less than 7 tokens. Given: 8"
    )
    assert lengths(7, max_new_tokens=3).max_new_tokens == 3
    assert lengths(4, max_new_tokens=None).max_new_tokens == 6
    assert lengths(4, version=3).max_new_tokens == 6
    truncated = lengths(9, max_new_tokens=2, truncate=3)
    assert truncated.token_ids == (6, 7, 8)


def test_release_3_checks_a_slice_and_stops_at_the_end_of_the_context() -> None:
    limits = Limits(max_input=2000, max_total=2048)
    parameters = GenerateParameters(max_new_tokens=100_000)
    assert check_lengths(range(1000), parameters, limits, 3).max_new_tokens == 1048
    assert message_of(check_lengths, range(1030), parameters, limits, 3).endswith(
        "Given: 1030 `inputs` tokens and 1024 `max_new_tokens`"
    )


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "regex", "value": "a+"}, Grammar.regex("a+")),
        ({"type": "json", "value": {"properties": {}}}, Grammar.json_schema({"properties": {}})),
        ({"type": "json", "value": '{"properties": {}}'}, Grammar.json_schema({"properties": {}})),
        (
            {"type": "json_object", "value": {"properties": {}}},
            Grammar.json_schema({"properties": {}}),
        ),
        (
            {"type": "json_schema", "value": {"name": "n", "schema": {"properties": {}}}},
            Grammar.json_schema({"properties": {}}),
        ),
        ({"type": "json", "value": 3}, "grammar is not supported"),
        ({"type": "json", "value": "3"}, "grammar is not supported"),
        ({"type": "json", "value": "{"}, "grammar is not valid: Expecting property name"),
    ],
)
def test_grammars(version: int, form: dict[str, Any], expected: Grammar | str) -> None:
    if isinstance(expected, Grammar):
        assert grammar_of(form, version=version, is_disabled=False) == expected
    else:
        message = message_of(grammar_of, form, version=version, is_disabled=False)
        assert message.startswith(expected)


def test_release_3_wants_properties() -> None:
    form = {"type": "json", "value": {"type": "object"}}
    assert grammar_of(form, version=2, is_disabled=False) == Grammar.json_object()
    message = message_of(grammar_of, form, version=3, is_disabled=False)
    assert message == "grammar is not valid: Grammar must have a 'properties' field"


SHAPE = "Failed to deserialize the JSON body into the target type: "


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"{}", 422, SHAPE + "missing field `inputs`"),
        (b'{"inputs":1}', 422, SHAPE + "inputs: invalid type: integer, expected string"),
        (
            b'{"inputs":"a","parameters":null}',
            422,
            SHAPE + "parameters: invalid type: null, expected map",
        ),
        (
            b'{"inputs":"a","parameters":{"stop":null}}',
            422,
            SHAPE + "parameters.stop: invalid type: null, expected sequence",
        ),
        (
            b'{"inputs":"a","parameters":{"stop":[1]}}',
            422,
            SHAPE + "parameters.stop[0]: invalid type: integer, expected string",
        ),
        (b'{"inputs":"a","parameters":{"do_sample":null}}', 422, SHAPE + "parameters.do_sample"),
        (b'{"inputs":"a","parameters":{"truncate":-1}}', 422, SHAPE + "parameters.truncate: "),
        (b'{"inputs":"a","parameters":{"seed":18446744073709551616}}', 422, SHAPE + "parameters"),
        (b'{"inputs":"a","parameters":{"grammar":{"type":"x"}}}', 422, SHAPE + "parameters"),
        (b'{"inputs":"a","parameters":{"grammar":{"type":"json"}}}', 422, SHAPE + "parameters"),
        (
            b'{"inputs":"a","parameters":{"grammar":{"type":"regex","value":1}}}',
            422,
            SHAPE + "parameters",
        ),
        (b'{"inputs":"a"', 400, "Failed to parse the request body as JSON: "),
        (b"", 400, "Failed to parse the request body as JSON: "),
        (b'{"inputs":"\xff"}', 400, "Failed to parse the request body as JSON: byte 11 is invalid"),
        (b'{"inputs":"","\xff":1}', 400, "Failed to parse the request body as JSON: byte 14 is"),
        (
            b'{"x":' + b"[" * 20_000,
            400,
            "Failed to parse the request body as JSON: recursion limit exceeded",
        ),
    ],
)
def test_shapes(body: bytes, status: int, text: str) -> None:
    with pytest.raises(HttpError) as caught:
        decode_generate(body, streams=False)
    assert caught.value.status == status
    assert str(caught.value).startswith(text)


def test_null_stream_is_a_wrong_shape_and_unknown_fields_are_not() -> None:
    with pytest.raises(HttpError):
        decode_compat(b'{"inputs":"a","stream":null}')
    assert (
        decode_generate(b'{"inputs":"a","stream":7,"x":[]}', streams=False).generations[0].inputs
        == "a"
    )


def test_without_parameters_text_is_sampled() -> None:
    for body, do_sample in ((b'{"inputs":"a"}', True), (b'{"inputs":"a","parameters":{}}', False)):
        [generation] = decode_generate(body, streams=False).generations
        assert generation.parameters.do_sample is do_sample


def test_compat_bodies_return_the_full_text_unless_told_otherwise() -> None:
    assert decode_compat(b'{"inputs":"a"}').generations[0].parameters.return_full_text
    told = decode_compat(b'{"inputs":"a","parameters":{"return_full_text":false}}')
    assert told.generations[0].parameters.return_full_text is False
    assert (
        decode_generate(b'{"inputs":"a"}', streams=False).generations[0].parameters.return_full_text
        is None
    )


@pytest.mark.parametrize(
    ("content_type", "passes"),
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        ("application/cloudevents+json", True),
        ("text/json", False),
        ("text/plain", False),
        ("", False),
    ],
)
def test_content_types(content_type: str, passes: bool) -> None:
    if passes:
        check_content_type(content_type)
        return
    with pytest.raises(HttpError) as caught:
        check_content_type(content_type)
    assert caught.value.status == 415
    assert str(caught.value) == "Expected request with `Content-Type: application/json`"


generate = partial(decode_generate, streams=False)


@pytest.mark.parametrize(
    ("decode", "body", "names"),
    [
        (generate, {"inputs": "a", "parameters": {"tempratur": 1}}, "parameters.tempratur"),
        (generate, {"inputs": "a", "stream": False, "max_new_tokens": 3}, "max_new_tokens"),
        (decode_compat, {"inputs": "a", "details": True, "\n": 1}, "details (and 1 more)"),
        (decode_completion, {"prompt": "a", "user": "u", "tempratur": 1}, "tempratur"),
    ],
)
def test_unknown_fields_are_ignored_but_logged(
    decode: Any, body: dict[str, Any], names: str, caplog: pytest.LogCaptureFixture
) -> None:
    decode(json.dumps(body).encode())
    assert caplog.messages == [f"a request's unknown fields are ignored: {names}"]


def test_known_fields_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    generate(b'{"inputs": "a", "parameters": {"seed": 1, "best_of": null}, "stream": true}')
    generate(b'{"inputs": "a", "parameters": {}}')
    assert not caplog.messages
