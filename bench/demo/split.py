"""Which combinations are held out: decided by a hash, so that no list has to be kept."""

from __future__ import annotations

from hashlib import blake2b

HELD_OUT_SHARE = 10
"""One combination in this many is never trained on."""


def is_held_out(kind: str, *parts: str | int) -> bool:
    """Whether the combination `parts` of a `kind` (its order matters) is kept from training."""
    text = "\x1f".join((kind, *map(str, parts)))
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0
