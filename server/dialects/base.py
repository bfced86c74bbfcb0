"""The seam between HTTP and a wire protocol: parse a call, render its events, render errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest

ANY_MODEL = frozenset({"tgi", "dummy"})
"""What clients of TGI, which has one model and heeds no name, call it where they know none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request as a protocol sees it: the body is complete, the model is chosen."""

    request_id: str
    body: bytes
    content_type: str = ""
    """As sent, parameters included; empty when the client sent none."""
    headers: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    input_number: int | None = None
    """Of a body that the model's own input formatter has made: by which it is known there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A complete response."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    close: bool = False
    """Close the connection afterwards."""


class HttpError(Exception):
    """A failure of HTTP itself or of routing; each protocol renders it in its own error format."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = headers or {}
        self.close = close


UTF8_EVENTS = "text/event-stream; charset=utf-8"
"""Events as OpenAI and Anthropic announce them; some clients take others for Latin-1."""


class Renderer(ABC):
    """Turns the events of one call into the body of its response; one instance per call.

    ``feed`` gets the events of request ``index`` in order. A streaming renderer answers with the
    bytes to send now (empty when there is nothing to say yet), one that doesn't stream answers
    empty until ``finish``.
    """

    streams: bool
    content_type: str
    starts_at_once: bool = False
    """The status doesn't wait for the first events: errors before them are sent by ``error``."""
    absorbs_failures: bool = False
    """An engine's failure ends the answer by ``error`` instead of taking its place."""
    ends_at_length: bool = False
    """The last frame of a choice tells of each of its tokens once more."""
    keep_alive: bytes = b""
    """Sent whenever a stream has been silent for a while; empty: nothing is."""
    headers: Mapping[str, str] = {}
    """Of the response, besides those that every answer has."""

    def final_headers(self) -> Mapping[str, str]:
        """Headers that are known only after ``finish``, of an answer that isn't streamed."""
        return {}

    @abstractmethod
    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes: ...

    @abstractmethod
    def finish(self) -> bytes:
        """What remains to be sent once every request has ended."""

    @abstractmethod
    def error(self, error: Exception) -> bytes:
        """The last bytes of a stream that has started and can't go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """What a call asks for: the engine's requests and how to answer."""

    requests: tuple[GenerationRequest, ...]
    renderer: Renderer
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens of each prompt, the last ones."""
    prompt_field: str = "prompt"
    """What the call's body names the prompt; errors about it say so."""
