"""Frames between the server and a handler's process: a JSON head and the bytes that it announces.

Layout: uint32 length of what follows, uint32 length of the head (both big-endian), the head as
UTF-8 JSON whose ``sizes`` are the lengths of the blobs, the blobs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

PREFIX = struct.Struct(">II")
MAX_BYTES = 0xFFFFFFFF


class FrameError(Exception):
    """What arrived is no frame, or is longer than allowed."""


class Frame(NamedTuple):
    """One message: ``head["kind"]`` says what it is."""

    head: dict[str, Any]
    blobs: tuple[bytes, ...] = ()


def encode_frame(head: dict[str, Any], blobs: Sequence[bytes] = ()) -> list[bytes]:
    """A frame as pieces to be written one after the other; FrameError when it is too long."""
    sizes = [len(blob) for blob in blobs]
    text = json.dumps({**head, "sizes": sizes}, separators=(",", ":")).encode()
    num_bytes = 4 + len(text) + sum(sizes)
    if num_bytes > MAX_BYTES:
        raise FrameError(f"a frame of {num_bytes} bytes is longer than {MAX_BYTES}")
    return [PREFIX.pack(num_bytes, len(text)), text, *blobs]


def frame_size(prefix: bytes, limit_bytes: int = MAX_BYTES) -> tuple[int, int]:
    """Bytes that follow the prefix, and how many of them are the head."""
    num_bytes, head_bytes = PREFIX.unpack(prefix)
    if num_bytes > limit_bytes:
        raise FrameError(f"a frame of {num_bytes} bytes is longer than the limit {limit_bytes}")
    if head_bytes + 4 > num_bytes:
        raise FrameError(f"a head of {head_bytes} bytes doesn't fit into {num_bytes}")
    return num_bytes - 4, head_bytes


def decode_head(text: bytes, num_blob_bytes: int) -> tuple[dict[str, Any], list[int]]:
    """A frame's head and the sizes of its blobs."""
    try:
        head = json.loads(text)
        sizes: list[int] = head.pop("sizes")
        valid = sum(sizes) == num_blob_bytes and all(size >= 0 for size in sizes)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FrameError(f"the head is not valid: {error}") from None
    if not valid:
        raise FrameError("the blobs don't have the sizes that the head announces")
    return head, sizes


def decode_frame(body: bytes, head_bytes: int) -> Frame:
    """The frame whose bytes after the prefix are ``body``."""
    head, sizes = decode_head(body[:head_bytes], len(body) - head_bytes)
    blobs = []
    at = head_bytes
    for size in sizes:
        blobs.append(body[at : at + size])
        at += size
    return Frame(head, tuple(blobs))
