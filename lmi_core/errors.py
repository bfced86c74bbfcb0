"""The three families of errors: the user's, capacity, and ours.

A message says what was asked, what is there, and what to change, with numbers. Protocols turn the
family into their own status and body; the command line turns it into one line and an exit code.
"""

from __future__ import annotations


class LmiError(Exception):
    """Base of every error that the package raises on purpose."""

    exit_code = 1


class UserError(LmiError):
    """The request or configuration can't be served as written (4xx; exit code 2).

    ``field`` names the offending parameter, key or file when there is one.
    """

    exit_code = 2

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextLengthError(UserError):
    """A prompt that doesn't fit into the model's context."""


class TaskError(UserError):
    """The model does something else than what is asked of it: generate, embed, or score pairs."""


class ModelError(UserError):
    """A model's files are missing, malformed or of a kind that isn't supported."""


class InsufficientMemoryError(UserError):
    """A model needs more memory than is left for it."""


class TooManyCopiesError(UserError):
    """More copies of a model than the machine has cores or devices for."""


class ConfigError(UserError):
    """A configuration can't be used; ``problems`` holds one line per fault, all of them at once."""

    def __init__(self, message: str, *, problems: tuple[str, ...] = (), field: str | None = None):
        super().__init__(message, field=field)
        self.problems = problems


class MissingExtraError(UserError):
    """An optional dependency is needed; the message names the extra to install."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the '{extra}' extra: pip install 'lmi-core[{extra}]'")
        self.extra = extra


class CapacityError(LmiError):
    """The server is full at the moment (429 or 503); ``retry_after_s`` hints when to come back."""

    exit_code = 3

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(LmiError):
    """The engine failed (5xx): a step raised, a worker died, or the engine is shutting down."""

    exit_code = 4


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Of the errors in a group, and in those within it, the first."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
