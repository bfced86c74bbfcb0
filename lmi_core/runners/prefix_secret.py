"""The secret of an installation that the hashes of prefixes on its disk are made with."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

SECRET_BYTES = 32
_NAME = "secret"


def installation_secret(directory: Path, known: bytes | None = None) -> bytes:
    """The secret in a directory for cached prefixes, made by whoever asks first: ``known``, if it
    was there before. Raises OSError."""
    path = directory / _NAME
    if not path.exists():
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = directory / f".{_NAME}-{os.getpid()}"
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, known or os.urandom(SECRET_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with suppress(FileExistsError):
            os.link(made, path)  # it is never half written, nor in the place of another's
        made.unlink()
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise OSError(f"{path} has {len(secret)} bytes instead of {SECRET_BYTES}; remove it")
    return secret


def derived(secret: bytes, purpose: str, num_bytes: int) -> bytes:
    """A secret of its own for each purpose."""
    return hashlib.blake2b(purpose.encode(), key=secret, digest_size=num_bytes).digest()
