"""The ``djl_python`` that handlers import."""

import io
import json
import struct

import numpy
import pytest

from lmi_core.custom_code.compat.djl_python import Input, Output
from lmi_core.custom_code.compat.djl_python.encode_decode import decode, encode
from lmi_core.custom_code.compat.djl_python.pair_list import PairList
from lmi_core.custom_code.compat.djl_python.request_io import Sequence, Token


def input_of(*pairs, **properties):
    return Input(properties, PairList(pairs))


def test_items_are_found_by_key_else_data_else_the_first():
    inputs = input_of(("a", b"1"), ("data", b"2"), ("a", b"3"))
    assert inputs.get_as_bytes() == b"2"
    assert inputs.get_as_string("a") == "1"
    assert input_of(("x", b"9"), ("y", b"8")).get_as_json() == 9
    assert Input().get_as_bytes() is None
    assert Input().get_as_json() is None
    for read in (inputs.get_as_bytes, inputs.get_as_json, inputs.get_as_numpy, inputs.get_as_csv):
        with pytest.raises(KeyError):
            read("absent")
    assert inputs.contains_key("a")
    assert not inputs.is_empty()
    assert Input().is_empty()


def test_properties_have_no_case():
    inputs = input_of(**{"Content-Type": "x"})
    assert inputs.get_property("content-type") == "x"
    assert inputs.get_property("other") is None
    assert inputs.get_batches() == [inputs]
    assert not inputs.is_batch()


def test_arrays_and_tables():
    array = numpy.arange(6.0).reshape(2, 3)
    output = Output().add_as_numpy(array).add_as_npz([array, array + 1])
    inputs = input_of(("data", output.content.value_at(0)), ("z", output.content.value_at(1)))
    assert (inputs.get_as_numpy() == array).all()
    first, second = inputs.get_as_npz("z")
    assert (second - first == 1).all()
    assert input_of(("data", b"a,b\n1,2\n")).get_as_csv() == [{"a": "1", "b": "2"}]


def test_pickled_arrays_are_refused():
    file = io.BytesIO()
    numpy.save(file, numpy.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="pickle"):
        input_of(("data", file.getvalue())).get_as_numpy()


@pytest.mark.parametrize(
    ("value", "body", "kind"),
    [
        (b"x", b"x", "application/octet-stream"),
        ("é", "é".encode(), "text/plain; charset=utf-8"),
        (17, b"17", "text/plain; charset=utf-8"),
        ({"é": [1]}, '{\n  "é":[\n    1\n  ]\n}'.encode(), "application/json"),
    ],
)
def test_what_is_added(value, body, kind):
    output = Output().add(value)
    assert (output.content.value_at(0), output.content_type) == (body, kind)


def test_errors_have_the_documented_form():
    output = Output().error("why", code=417)
    assert (output.code, output.message) == (417, "prediction failure")
    assert json.loads(output.content.value_at(0)) == {
        "code": 417,
        "message": "prediction failure",
        "error": "why",
    }
    output = Output().error("why", batch_index=2)
    assert (output.code, output.failures) == (200, {2: (424, "prediction failure")})
    assert output.content.key_at(0) == "batch_002"


def test_binary_encoding():
    encoded = Output.binary_encode({"data": "é", "last": True})
    assert encoded[:2] == struct.pack(">h", 2)
    assert encoded[2:10] == struct.pack(">i", 4) + b"data"
    assert encoded.endswith(struct.pack(">i", 4) + b"True")
    assert Output().finalize().code == 200


@pytest.mark.parametrize(
    ("content_type", "body", "expected"),
    [
        (None, b"", {"inputs": ""}),
        (None, b'{"a": 1}', {"a": 1}),
        ("application/json; charset=utf-8", b"[1]", [1]),
        ("text/plain", b"x", {"inputs": ["x"]}),
        ("text/csv", b"inputs\nx\ny\n", {"inputs": ["x", "y"]}),
        ("text/csv", b"question,context\nx,y\n", {"inputs": [{"question": "x", "context": "y"}]}),
        ("audio/wav", b"\x00", {"inputs": b"\x00"}),
        ("application/x-www-form-urlencoded", b"a=1", {"inputs": "a=1"}),
    ],
)
def test_decode(content_type, body, expected):
    assert decode(input_of(("data", body)), content_type) == expected


def test_decode_refuses_tables_without_text():
    with pytest.raises(ValueError, match="must name one of question, context, inputs"):
        decode(input_of(("data", b"a,b\n1,2\n")), "text/csv")


@pytest.mark.parametrize(
    ("accept", "kind"),
    [(None, "application/json"), ("text/csv", "text/csv"), ("*/*", "application/json")],
)
def test_encode(accept, kind):
    output = Output()
    encode(output, [{"a": 1}], accept)
    assert output.properties == {"Content-Type": kind}
    body = output.content.value_at(0)
    assert body == (b"a\r\n1\r\n" if kind == "text/csv" else b'[\n  {\n    "a":1\n  }\n]')


def test_a_sequence_hands_out_its_tokens_once():
    sequence = Sequence(tokens=[Token(1, "a"), Token(2, "b", -0.5, True)])
    assert sequence.get_next_token() == (Token(1, "a"), True, False)
    assert sequence.get_last_token() is None
    sequence.finish_reason = "length"
    token, is_first, is_last = sequence.get_next_token()
    assert (is_first, is_last) == (False, True)
    assert token.as_dict() == {"id": 2, "text": "b", "log_prob": -0.5, "special_token": True}
    assert sequence.get_next_token() == (None, False, False)
    assert sequence.get_last_token() is token
