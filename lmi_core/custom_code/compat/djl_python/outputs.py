"""What a handler returns."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from .pair_list import PairList

Chunks = Iterator[Any] | AsyncIterator[Any]


def default_stream_formatter(item: Any) -> str:
    """A line of JSON per item of a stream."""
    return json.dumps({"outputs": item}) + "\n"


class Output:
    """An answer: code, message, properties (they become headers), and content or a stream.

    In a batch, ``batch_index`` says whose answer is added; without it the first item added is the
    first request's, and so on.
    """

    def __init__(self, code: int = 200, message: str = "OK") -> None:
        self.code = code
        self.message = message
        self.properties: dict[str, str] = {}
        self.content = PairList()
        self.stream_content: tuple[Chunks, Callable[[Any], Any] | None] | None = None
        self.content_type: str | None = None
        """The type that the first item's kind implies, for answers that name none."""
        self.failures: dict[int, tuple[int, str]] = {}
        """Code and message of single requests of a batch."""

    def set_code(self, code: int) -> Output:
        self.code = code
        return self

    def set_message(self, message: str) -> Output:
        self.message = message
        return self

    def add_property(self, key: str, value: object) -> Output:
        self.properties[key] = str(value)
        return self

    def error(
        self,
        error: object,
        code: int = 424,
        message: str = "prediction failure",
        *,
        batch_index: int | None = None,
    ) -> Output:
        """Answer with an error object; with ``batch_index``, that request of the batch only."""
        text = _dumps({"code": code, "message": message, "error": str(error)})
        if batch_index is None:
            self.code, self.message = code, message
        else:
            self.failures[batch_index] = (code, message)
        return self._add(text, None, batch_index, "application/json")

    def add(self, value: Any, key: str | None = None, batch_index: int | None = None) -> Output:
        """Add bytes or text as they are, a dict or list as JSON, anything else as its text."""
        if isinstance(value, bytes | bytearray | memoryview):
            return self._add(bytes(value), key, batch_index, "application/octet-stream")
        if isinstance(value, dict | list):
            return self.add_as_json(value, key, batch_index)
        return self.add_as_string(value, key, batch_index)

    def add_as_string(
        self, value: object, key: str | None = None, batch_index: int | None = None
    ) -> Output:
        return self._add(str(value).encode(), key, batch_index, "text/plain; charset=utf-8")

    def add_as_json(
        self, value: Any, key: str | None = None, batch_index: int | None = None
    ) -> Output:
        return self._add(_dumps(value), key, batch_index, "application/json")

    def add_as_numpy(
        self, value: Any, key: str | None = None, batch_index: int | None = None
    ) -> Output:
        """Add an array in NumPy's .npy format."""
        import numpy

        file = io.BytesIO()
        numpy.save(file, value, allow_pickle=False)
        return self._add(file.getvalue(), key, batch_index, "application/x-npy")

    def add_as_npz(
        self, value: Any, key: str | None = None, batch_index: int | None = None
    ) -> Output:
        """Add arrays (a list, or a dict by name) as an .npz archive."""
        import numpy

        file = io.BytesIO()
        if isinstance(value, Mapping):
            numpy.savez(file, **value)
        else:
            numpy.savez(file, *value)
        return self._add(file.getvalue(), key, batch_index, "tensor/npz")

    def add_stream_content(
        self,
        stream: Chunks,
        output_formatter: Callable[[Any], Any] | None = default_stream_formatter,
    ) -> Output:
        """Answer piece by piece: what ``output_formatter`` makes of each item of ``stream``.

        None: the items are text or bytes and sent as they are.
        """
        self.stream_content = (stream, output_formatter)
        is_lines = output_formatter is default_stream_formatter
        self.content_type = "application/jsonlines" if is_lines else "text/plain; charset=utf-8"
        return self

    def finalize(self) -> Output:
        """The output itself: nothing is held back."""
        return self

    @staticmethod
    def binary_encode(pairs: Mapping[str, object]) -> bytes:
        """Texts by name as bytes: int16 count, then each text after its int32 length."""
        parts = [struct.pack(">h", len(pairs))]
        for name, value in pairs.items():
            for text in (str(name).encode(), str(value).encode()):
                parts += [struct.pack(">i", len(text)), text]
        return b"".join(parts)

    def _add(self, value: bytes, key: str | None, batch_index: int | None, kind: str) -> Output:
        if batch_index is not None:
            key = f"batch_{batch_index:03d}" + (f".{key}" if key else "")
        if self.content_type is None:
            self.content_type = kind
        self.content.add(key, value)
        return self


def _dumps(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, indent=2, separators=(",", ":"))
    return text.encode("utf-8", "replace")
