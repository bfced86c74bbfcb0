"""Properties files are read as ``java.util.Properties`` reads them."""

import pytest

from lmi_core.config.problem import Problems
from lmi_core.config.sources.origin import Precedence
from lmi_core.config.sources.properties import parse_properties, read_properties


def parse(data):
    problems = Problems()
    settings = parse_properties(data, "f", Precedence.FILE, problems)
    return {s.key: s.text for s in settings}, problems, settings


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a=1", {"a": "1"}),
        (b"a = 1", {"a": "1"}),
        (b"a: 1", {"a": "1"}),
        (b"a 1", {"a": "1"}),
        (b"  a\t=\t1  ", {"a": "1"}),
        (b"a==1", {"a": "=1"}),
        (b"a=b=c", {"a": "b=c"}),
        (b"# c\n! d\n\n  # e\na=1", {"a": "1"}),
        (b"a=1\rb=2\r\nc=3\n", {"a": "1", "b": "2", "c": "3"}),
        (b"a=x \\\n   y", {"a": "x y"}),
        (b"a=x\\\n#y", {"a": "x#y"}),
        (b"a=x\\\\\nb=2", {"a": "x\\", "b": "2"}),
        (b"a\\=b=1", {"a=b": "1"}),
        (b"a\\ b=1", {"a b": "1"}),
        (b"a=\\t\\n\\r\\f\\q\\:", {"a": "\t\n\r\fq:"}),
        (b"a=\\u0041\\u00e9", {"a": "A\u00e9"}),
        (b"a=\\ud83d\\ude00", {"a": "\U0001f600"}),
        (b"a=\\ud83d", {"a": "\ufffd"}),
        (b"a=\xe9", {"a": "\u00e9"}),
        (b"a=1\\", {"a": "1"}),
        (b"a", {"a": ""}),
        (b"", {}),
    ],
)
def test_syntax(data, expected):
    settings, problems, _ = parse(data)
    assert settings == expected
    assert not problems.errors


def test_line_numbers_are_those_of_the_first_physical_line():
    _, _, settings = parse(b"# c\na=1\n\nb=x\\\n  y\nc=3\n")
    assert [s.where for s in settings] == ["f:2", "f:4", "f:6"]


def test_the_last_of_duplicates_wins_with_a_warning():
    settings, problems, _ = parse(b"a=1\na=2\n")
    assert settings == {"a": "2"}
    assert "given before, in f:1" in str(problems.warnings[0])


def test_a_trailing_comment_is_part_of_the_value_with_a_warning():
    settings, problems, _ = parse(b"option.decoding_strategy=contrastive # others: greedy\n")
    assert settings["option.decoding_strategy"] == "contrastive # others: greedy"
    assert "part of the value" in str(problems.warnings[0])


def test_utf8_text_is_a_warning():
    _, problems, _ = parse("a=\u4e2d".encode())
    assert "ISO-8859-1" in str(problems.warnings[0])


@pytest.mark.parametrize(
    "data", ["\ufeffa=\u4e2d\nb=1".encode(), "\ufeffa=1\nb=1".encode("utf-16-le")]
)
def test_a_byte_order_mark_is_a_warning(data):
    settings, problems, _ = parse(data)
    assert "a" not in settings
    [warning] = problems.warnings
    assert str(warning).startswith("f: begins with a byte order mark")


def test_a_malformed_escape_is_an_error_with_its_line():
    settings, problems, _ = parse(b"a=1\nb=\\u12\n")
    assert settings == {"a": "1"}
    assert str(problems.errors[0]).startswith("f:2: \\u12 is not an escape")


def test_an_unreadable_file_is_a_warning(tmp_path):
    problems = Problems()
    assert read_properties(tmp_path / "absent", Precedence.FILE, problems) == []
    assert read_properties(tmp_path, Precedence.FILE, problems) == []
    assert len(problems.warnings) == 2
    assert not problems.errors


def test_a_huge_file_is_an_error(tmp_path):
    (tmp_path / "big").write_bytes(b"a" * (1 << 21))
    problems = Problems()
    assert read_properties(tmp_path / "big", Precedence.FILE, problems) == []
    assert "larger" in str(problems.errors[0])
