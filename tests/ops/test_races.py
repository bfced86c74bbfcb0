"""What the emulator says of kernels whose threads race."""

from __future__ import annotations

import ctypes
import re

import pytest

from tests.ops.cuda_kernels import RACES

pytestmark = pytest.mark.skipif(not RACES.exists(), reason="not built: make test-races")

NUM_THREADS = 64


def run(kernel: str) -> str:
    """What is found in that kernel of ``racing_kernels.cpp``."""
    library = ctypes.CDLL(str(RACES))
    library.lmi_cuda_error.restype = ctypes.c_char_p
    status = library[f"lmi_race_{kernel}"]((ctypes.c_int32 * (2 * NUM_THREADS))())
    return library.lmi_cuda_error().decode() if status else ""


@pytest.mark.parametrize(
    "kernel",
    [
        "block_ordered",
        "warp_ordered",
        "copied",
        "copied_of_nothing",
        "blocks_of_their_own",
        "sums",
        "last_block_sees",
    ],
)
def test_ordered_threads(kernel: str) -> None:
    assert run(kernel) == ""


@pytest.mark.parametrize(
    ("kernel", "accesses", "memory"),
    [
        ("block_unordered", {"write", "read"}, "shared"),
        ("warp_unordered", {"write", "read"}, "shared"),
        ("overwritten", {"write", "read"}, "shared"),
        ("matrices", {"write", "read"}, "shared"),
        ("in_variables", {"write", "read"}, "shared"),
        ("numbers", {"write", "read"}, "shared"),
        ("structures", {"write", "read"}, "shared"),
        ("copied_unordered", {"write", "read"}, "shared"),
        ("copied_too_late", {"copy under way", "read"}, "shared"),
        ("beyond_the_end", {"access beyond it"}, "shared"),
        ("blocks_together", {"write"}, "global"),
        ("blocks_read_and_write", {"write", "read"}, "global"),
        ("last_block_guesses", {"write", "read"}, "global"),
        ("last_block_of_silent", {"write", "read"}, "global"),
    ],
)
def test_unordered_threads(kernel: str, accesses: set[str], memory: str) -> None:
    text = run(kernel)
    assert text.startswith(f"{kernel}: ")
    assert "racing_kernels.cpp:" in text
    assert set(re.findall("an? ([a-z ]+) at ", text)) == accesses
    assert set(re.findall("([a-z]+) memory", text)) == {memory}


def test_kernels_wait_for_those_before() -> None:
    assert "without waiting for earlier kernels" in run("never_waiting")
    text = run("waiting_too_late")
    assert "an access before it at" in text
    assert "global memory" in text
