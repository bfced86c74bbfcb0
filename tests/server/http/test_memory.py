"""Memory that large bodies took goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

USE = """
import resource, sys
from pathlib import Path
from lmi_server.http.lifecycle import give_back_large_blocks

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20

if sys.argv[1] == "given back":
    give_back_large_blocks()
before, small = resident(), []
for _ in range(3):
    bodies = []
    for number in range(8):
        bodies.append(b"x" * (10 << 20))
        small.append(b"y" * (100 << 10))  # what stays, between them
    del bodies
print(resident() - before)
"""


@pytest.mark.parametrize(("how", "is_kept"), [("given back", False), ("left alone", True)])
def test_large_blocks(how: str, is_kept: bool) -> None:
    """Left alone, the C library keeps them: else there is nothing to do."""
    command = [sys.executable, "-c", USE, how]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert (int(done.stdout) > 40) == is_kept, done.stdout
