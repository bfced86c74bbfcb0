"""Reader of Java properties files (``serving.properties``, ``config.properties``).

Source of the format: DJL-Serving's ModelInfo.java, ``serving.properties``, and the Java platform's
documentation of ``Properties.load``: ISO-8859-1, backslash escapes, continued lines.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from lmi_core.config.paths import is_file
from lmi_core.config.problem import Problems
from lmi_core.config.sources.origin import Precedence, Setting
from lmi_core.files import open_regular

MAX_FILE_BYTES = 1 << 20

_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""Of UTF-8 it belongs to the first key; in UTF-16 no key is one."""
_BLANKS = " \t\f"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_LINE_END = re.compile(r"\r\n|\r|\n")
_TRAILING_COMMENT = re.compile(r"\s#")


def read_properties(path: Path, precedence: Precedence, problems: Problems) -> list[Setting]:
    """Return the settings of a file in order, the last of duplicates only.

    A file that can't be read is a warning, as in the reference; malformed escapes are errors.
    """
    try:
        with open_regular(path) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        problems.warn(str(path), f"can't be read ({error.strerror or error}); it is not used")
        return []
    if len(data) > MAX_FILE_BYTES:
        problems.error(str(path), f"is larger than {MAX_FILE_BYTES} bytes; it can't be options")
        return []
    return parse_properties(data, str(path), precedence, problems)


def read_server_file(
    named: str | None, environ: Mapping[str, str], problems: Problems
) -> list[Setting]:
    """Return the settings of the server's config.properties: of the one named, or of the first of
    the usual places."""
    if named is not None:
        path = Path(named)
        if not is_file(path):
            problems.error(named, "there is no such file")
            return []
        return read_properties(path, Precedence.SERVER_FILE, problems)
    home = environ.get("MODEL_SERVER_HOME")
    usual = [Path(home) / "conf" / "config.properties"] if home else []
    for path in (*usual, Path("config.properties")):
        if is_file(path):
            return read_properties(path, Precedence.SERVER_FILE, problems)
    return []


def parse_properties(
    data: bytes, name: str, precedence: Precedence, problems: Problems
) -> list[Setting]:
    """Return the settings in the bytes of a file called ``name``."""
    if data.startswith(_BYTE_ORDER_MARKS):
        problems.warn(
            name, "begins with a byte order mark, which spoils its keys: save it as ISO-8859-1"
        )
    elif not data.isascii() and _is_utf8(data):
        problems.warn(
            name, "has UTF-8 text, but properties are ISO-8859-1: write such characters as \\uXXXX"
        )
    settings: dict[str, Setting] = {}
    for line, text in _logical_lines(data.decode("latin-1")):
        where = f"{name}:{line}"
        try:
            key, value = _split(text)
        except ValueError as error:
            problems.error(where, str(error))
            continue
        if not key:
            problems.warn(where, f"{text.strip()[:80]!r} has no key; the line is not used")
            continue
        if key in settings:
            problems.warn(where, f"{key} was given before, in {settings[key].where}", key)
        if _TRAILING_COMMENT.search(value):
            problems.warn(where, f"{key}: the text after '#' is part of the value", key)
        settings[key] = Setting(key, value.rstrip(), precedence, where)
    return list(settings.values())


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number of the first line, joined text) without blank and comment lines."""
    joined, first = "", 0
    for number, line in enumerate(_LINE_END.split(text), 1):
        line = line.lstrip(_BLANKS)
        if not first and (not line or line[0] in "#!"):
            continue
        first = first or number
        if (len(line) - len(line.rstrip("\\"))) % 2:
            joined += line[:-1]
            continue
        yield first, joined + line
        joined, first = "", 0
    if first:
        yield first, joined


def _split(text: str) -> tuple[str, str]:
    end = 0
    while end < len(text) and text[end] not in _BLANKS + "=:":
        end += 2 if text[end] == "\\" else 1
    rest = text[end:].lstrip(_BLANKS)
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(_BLANKS)
    return _unescape(text[:end]), _unescape(rest)


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    out: list[str] = []
    position = 0
    while position < len(text):
        char = text[position]
        position += 1
        if char != "\\":
            out.append(char)
            continue
        escaped = text[position : position + 1]
        position += 1
        if escaped == "u":
            digits = text[position : position + 4]
            if not re.fullmatch("[0-9A-Fa-f]{4}", digits):
                raise ValueError(f"\\u{digits} is not an escape: write \\u and four hex digits")
            out.append(chr(int(digits, 16)))
            position += 4
        else:
            out.append(_ESCAPES.get(escaped, escaped))
    # Escaped surrogate pairs are one character; a lone half is not text.
    return "".join(out).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
