"""Types of values accept what the reference accepts and say what they allow."""

import pytest

from lmi_core.config.table.value_type import (
    Bool,
    Bytes,
    Choice,
    Float,
    Int,
    Items,
    Json,
    Rate,
    ScaledInt,
    StopList,
    Text,
)


@pytest.mark.parametrize("word", ["true", "TRUE", "1", "yes", "on", "t", "Y"])
def test_true_words(word):
    assert Bool().parse(word) is True


@pytest.mark.parametrize("word", ["false", "False", "0", "no", "OFF", "f", "n"])
def test_false_words(word):
    assert Bool().parse(word) is False


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Int(), "3", 3),
        (Int(), " -7 ", -7),
        (Int(1, words=("max",)), "MAX", "max"),
        (Bytes(), "4096", 4096),
        (Bytes(), "512M", 512 << 20),
        (Bytes(), "2gib", 2 << 30),
        (Rate(), "10", (10, 60.0)),
        (Rate(), "10/PT30S", (10, 30.0)),
        (Rate(), " 3/P1DT2H3M4.5S ", (3, 93784.5)),
        (Float(0, 1), "0.33", 0.33),
        (Float(0, 1), "1e-2", 0.01),
        (Choice(("auto", "lmi-dist")), "LMI-Dist", "lmi-dist"),
        (Items(Int(1)), "256, 512,1024", (256, 512, 1024)),
        (Json(), '{"a": 1}', '{"a": 1}'),
        (Json(of_object=True, words=("linear",)), " linear", "linear"),
        (Json(of_object=True, words=("linear",)), '{"a": 1}', '{"a": 1}'),
        (ScaledInt(), "4096", 4096),
        (ScaledInt(), "4k", 4000),
        (ScaledInt(), "4K", 4096),
        (ScaledInt(), "25.6k", 25600),
        (ScaledInt(), "1M", 1 << 20),
        (ScaledInt(), "2.5g", 2_500_000_000),
        (ScaledInt(has_auto=True), "Auto", "auto"),
        (ScaledInt(has_auto=True), "-1", "auto"),
        (Text(), "a b", "a b"),
        (StopList(), '["a, b", "c"]', ("a, b", "c")),
        (StopList(), "['x', 'y']", ("x", "y")),
        (StopList(), "[]", ()),
    ],
)
def test_possible_values(kind, text, value):
    assert kind.parse(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "allowed"),
    [
        (Bool(), "maybe", "true or false"),
        (Int(), "3.0", "integer"),
        (Int(), "\u0663", "integer"),
        (Int(), "9" * 5000, "integer"),
        (Int(1), "0", ">= 1"),
        (Int(1, 3), "4", "1 to 3"),
        (Rate(), "10/PT", "10/PT30S"),
        (Rate(), "10/30", "10/PT30S"),
        (Rate(), "-1", "10/PT30S"),
        (Bytes(), "0", "512M"),
        (Bytes(), "9999999999T", "512M"),
        (Bytes(), "1.5G", "512M"),
        (Float(0, 1), "1.5", "0 to 1"),
        (Float(0, 1), "nan", "0 to 1"),
        (Float(1, above=True), "1.0", "> 1"),
        (Float(), "inf", "number"),
        (Float(), "x", "number"),
        (Choice(("a", "b")), "c", "a, b"),
        (Choice(("Python",), exact=True), "python", "Python"),
        (Items(Int(1)), "1,,2", "integer"),
        (Json(), "{", "JSON"),
        (Json(of_object=True), "[1]", "JSON object"),
        (Json(of_object=True, words=("linear",)), "cubic", "linear or a JSON object"),
        (ScaledInt(), "-1", "integer >= 1"),
        (ScaledInt(), "auto", "integer >= 1"),
        (ScaledInt(), "0k", "out of range"),
        (Int(1), "9" * 20, "at most 9223372036854775807"),
        (ScaledInt(), "9999999T", "out of range"),
        (ScaledInt(), "1.5K", "write 1.5k, a power of 1000"),
        (ScaledInt(has_auto=True), "4 k", "or auto"),
        (Json(), "[" * 100_000, "JSON"),
        (Text(), "a\0b", "NUL"),
        (Text("path"), "", "path"),
        (StopList(), "a, b", "brackets"),
        (StopList(), "[a, b]", "quoted"),
        (StopList(), "[1]", "quoted"),
    ],
)
def test_impossible_values_name_what_is_allowed(kind, text, allowed):
    with pytest.raises(ValueError, match=allowed):
        kind.parse(text)
