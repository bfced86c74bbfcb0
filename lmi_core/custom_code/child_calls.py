"""Calls of a handler's function: requests in, its answer or stream out."""

from __future__ import annotations

import asyncio
import inspect
import operator
import re
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from lmi_core.custom_code.frame import Frame

Write = Callable[..., None]

_BATCH_KEY = re.compile(r"batch_(\d+)(\.|$)")
_MEMORY_ERRORS = ("OutOfMemoryError", "MemoryError")
_NO_CONTENT = 204
_FAILED = 300


class Calls:
    """Runs the function, in the thread that calls ``answer``; coroutines run to their end."""

    def __init__(
        self,
        djl: ModuleType,
        function: Callable[[Any], Any],
        write: Write,
        cancelled: set[int],
        max_output_bytes: int,
    ) -> None:
        self._djl = djl
        self._function = function
        self._write = write
        self._cancelled = cancelled
        self._max_output_bytes = max_output_bytes
        self._loop: asyncio.AbstractEventLoop | None = None

    def initialise(self, properties: dict[str, str]) -> None:
        """The first call, without content; raises when the handler refuses."""
        output = self._finished(self._function(self._djl.Input(properties)))
        if output is None:
            return
        self._check(output)
        if output.code >= _FAILED:
            values = output.content.values
            values = values() if callable(values) else values
            raise RuntimeError(
                values[0].decode("utf-8", "replace")[:2000] if values else output.message
            )

    def answer(self, frame: Frame) -> None:
        """Call the function with a frame's requests and write what it returns."""
        call_id, is_batch = frame.head["id"], len(frame.head["requests"]) > 1
        try:
            output = self._finished(self._function(self._inputs(frame)))
            if output is None:
                output = self._djl.Output(_NO_CONTENT, "No content")
            self._check(output)
            stream = getattr(output, "stream_content", None)
            if stream is not None and is_batch:
                raise NotImplementedError("Dynamic batch not supported for generic streaming")
        except Exception as error:
            traceback.print_exc()
            output, stream = self._failure(error), None
        if self._write_output(call_id, output, is_batch, streams=stream is not None):
            self._write_stream(call_id, stream)
        self._cancelled.discard(call_id)

    def _inputs(self, frame: Frame) -> Any:
        blobs = iter(frame.blobs)
        inputs = []
        for request in frame.head["requests"]:
            content = self._pairs((key, next(blobs)) for key in request["keys"])
            inputs.append(self._djl.Input(request["properties"], content))
        if len(inputs) == 1:
            return inputs[0]
        content = self._pairs(
            (f"batch_{index:03d}.{key}", value)
            for index, single in enumerate(inputs)
            for key, value in single.content
        )
        properties = {**frame.head["properties"], "batch_size": str(len(inputs))}
        for index, single in enumerate(inputs):
            for name, value in single.properties.items():
                properties[f"batch_{index:03d}.{name}"] = value
        return self._djl.Input(properties, content, inputs)

    def _pairs(self, pairs: Iterator[tuple[str, bytes]]) -> Any:
        return self._djl.inputs.PairList(pairs)

    def _finished(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result
        return self._event_loop().run_until_complete(_await(result))

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop

    @staticmethod
    def _check(output: Any) -> None:
        """By its parts, not its class: an installed djl_python has a class of its own."""
        if not all(hasattr(output, name) for name in ("code", "message", "properties", "content")):
            raise TypeError(f"Invalid output type: {type(output)}")

    def _failure(self, error: Exception) -> Any:
        if type(error).__name__ in _MEMORY_ERRORS:
            return self._djl.Output(507, str(error) or "out of memory")
        return self._djl.Output().error(error)

    def _write_output(self, call_id: int, output: Any, is_batch: bool, *, streams: bool) -> bool:
        """Write it, or why it can't be; whether the pieces of its stream may follow."""
        try:
            head, values = _parts(output)
            if (num_bytes := sum(map(len, values))) > self._max_output_bytes:
                raise ValueError(self._too_long(num_bytes))
        except Exception as error:
            traceback.print_exc()
            (head, values), streams = _parts(self._djl.Output().error(error)), False
        keys = head.pop("keys")
        head |= {"kind": "output", "id": call_id, "streams": streams}
        self._write({**head, "indices": _indices(keys) if is_batch else []}, *values)
        return streams

    def _write_stream(self, call_id: int, stream: Any) -> None:
        items, formatter = stream
        head: dict[str, Any] = {"kind": "chunk", "id": call_id}
        try:
            for item in self._items(items):
                if call_id in self._cancelled:
                    break
                piece = item if formatter is None else formatter(item)
                blob = piece if isinstance(piece, bytes) else str(piece).encode("utf-8", "replace")
                if len(blob) > self._max_output_bytes:
                    raise ValueError(self._too_long(len(blob)))
                self._write({**head, "last": False}, blob)
        except Exception as error:
            traceback.print_exc()
            self._write({**head, "last": True, "error": str(error)})
        else:
            self._write({**head, "last": True})
        finally:
            close = getattr(items, "close", None)
            if callable(close):
                close()

    def _items(self, items: Any) -> Iterator[Any]:
        if not hasattr(items, "__aiter__"):
            yield from items
            return
        loop, iterator = self._event_loop(), items.__aiter__()
        try:
            while True:
                yield loop.run_until_complete(_await(iterator.__anext__()))
        except StopAsyncIteration:
            return
        finally:
            if hasattr(iterator, "aclose"):
                loop.run_until_complete(iterator.aclose())

    def _too_long(self, num_bytes: int) -> str:
        return (
            f"the answer is {num_bytes} bytes long, but option.max_output_size allows "
            f"{self._max_output_bytes}"
        )


def _parts(output: Any) -> tuple[dict[str, Any], list[bytes]]:
    """An output's head and items, read where a handler may have put anything; raises what that
    raises, TypeError for a status that isn't a whole number."""
    content = output.content
    keys = content.keys() if callable(content.keys) else content.keys
    values = [
        value if isinstance(value, bytes) else str(value).encode()
        for value in (content.values() if callable(content.values) else content.values)
    ]
    failures = getattr(output, "failures", {}).items()
    kind = getattr(output, "content_type", None)
    head = {
        "keys": [None if key is None else str(key) for key in keys],
        "code": _status(output.code),
        "message": str(output.message),
        "properties": {str(k): str(v) for k, v in output.properties.items()},
        "content_type": None if kind is None else str(kind),
        "failures": {int(k): (_status(code), str(message)) for k, (code, message) in failures},
    }
    return head, values


def _status(code: Any) -> int:
    try:
        return operator.index(code)
    except TypeError:
        raise TypeError(f"the status {code!r:.80} is not a whole number") from None


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _indices(keys: list[str | None]) -> list[int | None]:
    """Whose request each item answers, where its key says so."""
    found = (_BATCH_KEY.match(key) if key else None for key in keys)
    return [int(match[1]) if match else None for match in found]
