"""What the tests let children do."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path


def pid() -> int:
    return os.getpid()


def spin() -> None:
    while True:
        pass


def sleep(seconds: float, begun: Path | None = None) -> None:
    """``begun``: a file that is there from then on."""
    if begun is not None:
        begun.touch()
    time.sleep(seconds)


def allocate(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def large(num_bytes: int) -> bytes:
    return bytes(num_bytes)


def grow_and_stay(num_bytes: int) -> int:
    return allocate(num_bytes)


def die() -> None:
    os._exit(3)


def warn(text: str) -> str:
    logging.getLogger("tests.sandbox").warning("seen: %s", text)
    return text


class Refusal(Exception):
    """Takes more than a message, as ours do."""

    def __init__(self, code: int, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.code, self.hint = code, hint


def refuse() -> None:
    raise Refusal(7, "no", hint="ask again")


def name_of(thing: object) -> str:
    return type(thing).__name__


def environment() -> dict[str, str]:
    return dict(os.environ)


def generate() -> object:
    return (number for number in range(3))
