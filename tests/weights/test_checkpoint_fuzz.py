"""Damaged checkpoints in quantised formats: one error, before memory is spent, or a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", exc_type=ImportError)

from tests.weights.checkpoint_fuzz import SOUND, in_memory, mutate_and_read

NUM_FILES = 200
CHOSEN = (
    *("gptq-reordered", "gptq-8-groups", "awq", "packed-reordered", "int8"),
    *("nvfp4", "mxfp4", "modelopt", "bitsandbytes-nf4 twice", "bitsandbytes-int8", "exl2"),
    *("kernels-gemv", "kernels-gemv-fast", "kernels-awq-marlin", "kernels-marlin"),
    *("fp8-block", "fp8-experts", "gpt-oss", "gguf-Q4_K", "gguf-qwen2_moe"),
)
"""One for each reader at least."""


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with in_memory() as path:
        monkeypatch.setenv("XDG_CACHE_HOME", path)
        yield Path(path)


@pytest.mark.parametrize("name", CHOSEN)
def test_damaged_checkpoints_are_refused_by_name_or_read(name: str, directory: Path) -> None:
    SOUND[name](directory / "model")
    num_refused = mutate_and_read(directory / "model", NUM_FILES, 7, loads_every=0)
    assert NUM_FILES // 2 < num_refused < NUM_FILES
