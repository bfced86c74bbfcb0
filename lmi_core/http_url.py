"""A server's URL, as clients take it apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from lmi_core.errors import UserError


class HttpUrl(NamedTuple):
    """``path`` has no slash at its end; it is empty for a server's root."""

    host: str
    port: int
    path: str
    is_https: bool

    @classmethod
    def parse(cls, text: str) -> HttpUrl:
        """Raises UserError; ``http://`` may be missing, and ``/v1`` at the end doesn't count."""
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname or "", parts.port
            is_url = parts.scheme in ("http", "https") and bool(host.encode("idna"))
        except ValueError:  # brackets, the port, or a label of the host's name that is too long
            is_url = False
        if not is_url:
            raise UserError(
                f"{text[:200]!r} is no URL such as http://127.0.0.1:8080", field="--url"
            )
        is_https = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(host, port or (443 if is_https else 80), path, is_https)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_https else 'http'}://{host}:{self.port}{self.path}"


def model_beside_url(words: Sequence[str]) -> str:
    """The model's name that arguments beside ``--url`` are, "" for none; UserError for others."""
    flag = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    if flag is not None:
        raise UserError(
            f"{flag[:80]} is none of this command's own flags (see --help), "
            "and beside --url no model is loaded here that others could configure"
        )
    if len(words) > 1:
        raise UserError(f"--url takes one model's name besides, got {' '.join(words)[:200]}")
    return "".join(words)


def key_header() -> dict[str, str]:
    """What shows a server the key of ``OPENAI_API_KEY``, where there is one; UserError for one that
    no header can carry."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not key.isascii() or not key.isprintable():
        raise UserError("OPENAI_API_KEY must be printable ASCII, without line breaks")
    return {"Authorization": f"Bearer {key}"} if key else {}


def refused_key(url: str) -> UserError:
    """What a server's 401 means to somebody who has a command line."""
    if key_header():
        return UserError(f"{url} refuses the API key that is in OPENAI_API_KEY")
    return UserError(f"{url} wants an API key: put it into OPENAI_API_KEY")
