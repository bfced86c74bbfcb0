"""How many classes one has to know to follow a token from a body to its frame."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.checkpoints import cached_checkpoint

pytest.importorskip("torch")

MAX_CLASSES, MAX_FILES, MAX_ON_PATH = 51, 70, 22
"""These may only fall: who adds a class to the walk removes one."""


def test_the_walk_of_a_token_gets_no_longer() -> None:
    command = [sys.executable, "-m", "tests.server.token_walk", str(cached_checkpoint("llama2"))]
    # In a process of its own nothing has been made for an earlier call.
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for made in (
        "sequence.Sequence",
        "plan.Output",
        "outputs.TokenEvent",
        "model_choice.ModelChoice",
    ):
        assert f".{made}: " in done.stdout
    words = done.stdout.splitlines()[-1].split()
    num_classes, num_files, num_on_path = int(words[0]), int(words[3]), int(words[5])
    assert num_classes <= MAX_CLASSES, done.stdout
    assert num_files <= MAX_FILES, done.stdout
    assert num_on_path <= MAX_ON_PATH, done.stdout
