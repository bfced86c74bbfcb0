"""Frames survive the way, and what isn't one is refused."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmi_core.custom_code.frame import PREFIX, FrameError, decode_frame, encode_frame, frame_size

HEADS = st.dictionaries(st.text(max_size=8), st.integers() | st.text(max_size=8), max_size=3)


@given(HEADS, st.lists(st.binary(max_size=50), max_size=4))
def test_a_frame_arrives_as_it_was(head, blobs):
    head.pop("sizes", None)
    data = b"".join(encode_frame(head, blobs))
    num_bytes, head_bytes = frame_size(data[: PREFIX.size])
    assert num_bytes == len(data) - PREFIX.size
    assert decode_frame(data[PREFIX.size :], head_bytes) == (head, tuple(blobs))


@given(st.binary(max_size=60), st.integers(0, 60))
def test_any_bytes_are_a_frame_or_an_error(body, head_bytes):
    try:
        frame = decode_frame(body, head_bytes)
    except FrameError:
        return
    assert sum(map(len, frame.blobs)) == len(body) - head_bytes


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 5000,
        json.dumps({"sizes": [4]}).encode(),
        json.dumps({"sizes": [-1, 4]}).encode(),
        json.dumps({"sizes": "abc"}).encode(),
        json.dumps({"sizes": None}).encode(),
    ],
)
def test_broken_heads(head):
    with pytest.raises(FrameError):
        decode_frame(head + b"xyz", len(head))


def test_lengths_are_bounded():
    with pytest.raises(FrameError, match="longer than the limit 100"):
        frame_size(struct.pack(">II", 101, 4), 100)
    with pytest.raises(FrameError, match="doesn't fit"):
        frame_size(struct.pack(">II", 10, 7), 100)
