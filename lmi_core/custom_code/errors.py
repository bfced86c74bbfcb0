"""Failures of a handler's process, as far as the handler didn't answer them itself."""

from __future__ import annotations

from enum import StrEnum

from lmi_core.errors import EngineError


class FailureKind(StrEnum):
    """What happened; protocols choose the status by it."""

    CRASHED = "crashed"
    """The process ended, or wrote what isn't a frame, while it had the request."""
    TIMEOUT = "timeout"
    STOPPED = "stopped"
    """No process runs: the last ones failed, and the next one isn't there yet."""
    MISMATCH = "mismatch"
    """A batch was answered with another number of answers."""
    SHUTDOWN = "shutdown"


class HandlerError(EngineError):
    """A request that its handler could not answer."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class LoadError(EngineError):
    """A process could not load its model; ``code`` is 507 when memory ran out, else 424."""

    def __init__(self, message: str, code: int = 424) -> None:
        super().__init__(message)
        self.code = code
