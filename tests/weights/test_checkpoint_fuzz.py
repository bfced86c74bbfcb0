"""Damaged checkpoints in quantised formats: one error, before memory is spent, or a model."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", exc_type=ImportError)

from tests.weights.checkpoint_fuzz import SOUND, mutate_and_read

CHOSEN = (
    *("gptq-reordered", "gptq-8-groups", "nvfp4", "mxfp4", "modelopt", "bitsandbytes-nf4 twice"),
    *("exl2", "kernels-gemv-fast", "kernels-marlin", "fp8-experts", "gguf-Q4_K", "gguf-qwen2_moe"),
)


@pytest.mark.parametrize("name", CHOSEN)
def test_damaged_checkpoints_are_refused_by_name_or_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    SOUND[name](tmp_path / "model")
    assert 40 < mutate_and_read(tmp_path / "model", 80, 7, loads_every=0) < 80
