"""Damaged checkpoints in quantised formats: one error, before memory is spent, or a model."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", exc_type=ImportError)

from tests.weights.checkpoint_fuzz import SOUND, mutate_and_read

NEWER = ("gptq-reordered", "gptq-8-groups", "nvfp4", "mxfp4", "modelopt", "nf4", "exl2")


@pytest.mark.parametrize("name", NEWER)
def test_damaged_checkpoints_are_refused_by_name_or_read(name: str, tmp_path: Path) -> None:
    SOUND[name](tmp_path / "model")
    assert 100 < mutate_and_read(tmp_path / "model", 200, 7, loads=False) < 200
