"""Configuration of the LMI protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lmi_core.errors import UserError
from lmi_server.dialects.lmi.release import Release
from lmi_server.dialects.lmi.session_store import SessionOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class LmiOptions:
    """Configuration of the protocol (``option.*`` keys of the same names)."""

    output_formatter: str | None = None
    """json, jsonlines or sse: beats what a request asks for. None: each request decides."""
    tgi_compat: bool = False
    """Lists, TGI's token names and server-sent events, for TGI's clients."""
    custom_formatter: bool = False
    """The model's own formatter writes the answers; beats every other choice."""
    release: Release | None = None
    """Speak as this release did (lmi_compat). None: as 0.29, and chats as OpenAI does."""
    pipeline: Literal["", "answers", "lines", "lines with prompt"] = ""
    """Answer as LMI does without a rolling batch (rolling_batch=disable, enable_streaming)."""
    strategy: str = ""
    """How requests that don't say it are decoded (decoding_strategy); "": their other parameters
    decide."""
    watermark_gamma: float = 0.5
    watermark_delta: float = 2.0
    sessions: SessionOptions | None = None
    """Where stateful sessions are kept, and how long; None: they are off."""
    stop: tuple[str, ...] = ()
    """Texts that end every answer (stop_sequence)."""
    statuses: Mapping[str, int] = field(default_factory=dict)
    """HTTP statuses by kind of failure: bad_request, wlm_error, throttle_error, server_error."""

    def __post_init__(self) -> None:
        release = self.release
        if release is None or release >= Release.V0_28:
            return
        for name, is_set in (
            ("tgi_compat", self.tgi_compat),
            ("output_formatter=sse", self.output_formatter == "sse"),
        ):
            if is_set:
                raise UserError(
                    f"option.{name} came with LMI 0.28, but option.lmi_compat is {release}; "
                    "leave one of them out",
                    field="option.lmi_compat",
                )

    @property
    def form(self) -> Release:
        """The release whose bodies and answers are this protocol's."""
        return self.release or Release.V0_29
