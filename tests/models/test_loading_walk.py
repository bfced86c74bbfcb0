"""How far one has to walk through the code to follow how a model is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.checkpoints import cached_checkpoint
from tests.models.loading_walk import walk_of

pytest.importorskip("torch")

MAX_STAYS, MAX_FILES, MAX_RETURNS = 90, 26, 64
"""These may only fall: who lengthens the walk shortens it elsewhere."""


def test_the_walk_of_loading_gets_no_longer() -> None:
    command = [sys.executable, "-m", "tests.models.loading_walk", str(cached_checkpoint("llama2"))]
    # In a process of its own nothing is remembered of models that were loaded before.
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[-1].split()
    num_stays, num_files, num_returns = int(words[0]), int(words[3]), int(words[5])
    assert num_stays <= MAX_STAYS, done.stdout
    assert num_files <= MAX_FILES, done.stdout
    assert num_returns <= MAX_RETURNS, done.stdout


def test_a_walk_counts_each_caller_once_and_only_our_functions() -> None:
    from lmi_core.files import user_cache
    from lmi_core.units import megabytes

    def one() -> None:
        for _ in range(3):
            megabytes(1)
        user_cache({})
        sorted([megabytes(2)])

    def other() -> None:
        megabytes(3)

    walk = walk_of(lambda: (one(), other()))
    assert [file for file, _ in walk.stays] == ["units.py", "files.py", "units.py"]
    assert (walk.num_files, walk.num_returns) == (2, 1)
