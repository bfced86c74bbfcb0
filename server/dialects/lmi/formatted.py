"""LMI's answers as a model's own output formatter writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.request import GenerationRequest
from lmi_server.dialects.base import Renderer
from lmi_server.dialects.lmi.output import error_body


@dataclass(frozen=True, slots=True, kw_only=True)
class FormattedRequest(GenerationRequest):
    """A request whose answer the formatter writes."""

    text: str
    """The prompt as it was sent."""
    parameters: Mapping[str, object] = field(default_factory=dict)
    input_number: int | None = None
    """By which the model's own input formatter knows it."""


class FormattedEvents(list[TokenEvent]):
    """Events and, in ``frame``, what the formatter made of them."""

    frame: bytes = b""


class FormattedRenderer(Renderer):
    """Sends what the formatter writes, as it comes."""

    streams = True

    def __init__(self, *, streamed: bool) -> None:
        self.content_type = "application/jsonlines" if streamed else "application/json"

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        assert isinstance(events, FormattedEvents)
        return events.frame

    def finish(self) -> bytes:
        return b""

    def error(self, error: Exception) -> bytes:
        return error_body(error)
