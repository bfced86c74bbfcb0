"""A request to a handler and its answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lmi_core.custom_code.errors import FailureKind, HandlerError
from lmi_core.custom_code.frame import Frame

_FAILED = 300
_NO_CONTENT = 204


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerRequest:
    """Headers and other properties, and content items by key; keys may repeat."""

    properties: Mapping[str, str] = field(default_factory=dict)
    content: Sequence[tuple[str, bytes]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerAnswer:
    """What a handler answered: an HTTP status with its phrase, headers, and a body or a stream."""

    code: int
    message: str
    properties: Mapping[str, str]
    content_type: str | None
    """What the kind of the content implies, for answers whose properties name no type."""
    body: bytes = b""
    chunks: AsyncIterator[bytes] | None = None
    """Raises EngineError when the stream can't go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A handler's output for all requests of a call."""

    answer: HandlerAnswer
    blobs: tuple[bytes, ...]
    indices: tuple[int | None, ...]
    failures: Mapping[int, tuple[int, str]]
    streams: bool


def read_output(frame: Frame) -> Output:
    """The output in a frame; HandlerError when it isn't one."""
    head = frame.head
    try:
        answer = HandlerAnswer(
            code=_status(head["code"]),
            message=str(head["message"]),
            properties={str(k): str(v) for k, v in head["properties"].items()},
            content_type=head["content_type"],
        )
        return Output(
            answer=answer,
            blobs=frame.blobs,
            indices=tuple(head["indices"]),
            failures={int(k): _failure(v) for k, v in head["failures"].items()},
            streams=bool(head["streams"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        message = f"Python worker disconnected. (its answer is malformed: {error!r})"
        raise HandlerError(FailureKind.CRASHED, message) from None


def split_output(output: Output, num_requests: int) -> list[HandlerAnswer]:
    """One answer per request of a batch, in their order.

    An output that failed as a whole is everybody's answer. HandlerError when there are more or
    fewer answers than requests.
    """
    answer, blobs = output.answer, output.blobs
    if num_requests == 1:
        return [_single(output)]
    if answer.code >= _FAILED or (answer.code == _NO_CONTENT and not blobs):
        return [replace(answer, body=blobs[0] if blobs else b"")] * num_requests
    bodies = _by_request(output)
    if sorted(bodies) != list(range(num_requests)):
        raise HandlerError(
            FailureKind.MISMATCH,
            f"Batch output size mismatch, expected: {num_requests}, actual: {len(bodies)}",
        )
    return [_one_of(output, index, bodies[index]) for index in range(num_requests)]


def _single(output: Output) -> HandlerAnswer:
    code, message = output.failures.get(0, (output.answer.code, output.answer.message))
    body = output.blobs[0] if output.blobs else b""
    return replace(output.answer, code=code, message=message, body=body)


def _by_request(output: Output) -> dict[int, bytes]:
    """The first item that names each request; without names, items in order."""
    if all(index is None for index in output.indices):
        return dict(enumerate(output.blobs))
    bodies: dict[int, bytes] = {}
    for index, blob in zip(output.indices, output.blobs, strict=True):
        if index is not None:
            bodies.setdefault(index, blob)
    return bodies


def _one_of(output: Output, index: int, body: bytes) -> HandlerAnswer:
    answer = output.answer
    code, message = output.failures.get(index, (answer.code, answer.message))
    properties: dict[str, str] = {}
    own: dict[str, str] = {}
    for name, value in answer.properties.items():
        number, header = _batch_property(name)
        if number is None:
            properties[name] = value
        elif number == index:
            own[header] = value
    kind = "application/json" if index in output.failures else answer.content_type
    return replace(
        answer,
        code=code,
        message=message,
        properties={**properties, **own},
        content_type=kind,
        body=body,
    )


def _batch_property(name: str) -> tuple[int | None, str]:
    """``batch_<i>_<Header>`` is a header of request i."""
    start, _, rest = name.partition("_")
    number, separator, header = rest.partition("_")
    if start == "batch" and separator and number.isdecimal():
        return int(number), header
    return None, name


def _failure(value: Any) -> tuple[int, str]:
    code, message = value
    return _status(code), str(message)


def _status(code: Any) -> int:
    return code if isinstance(code, int) and 200 <= code <= 599 else 500
