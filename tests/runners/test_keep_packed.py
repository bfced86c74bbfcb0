"""Packed weights that one process makes for those that load the model after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.runners.cpu import cpu_runner
from lmi_core.runners.cpu.cpu_model import find_cpu_model
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.weights import repack_cache


def test_packed_weights_are_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(repack_cache, "MIN_CHECKPOINT_BYTES", 0)
    config = EngineConfig(model=MODEL_DIR, repack_cache_dir=str(tmp_path))
    cpu_runner.keep_packed(find_cpu_model(config))
    [packed] = tmp_path.glob("*.packed")
    inode = packed.stat().st_ino
    cpu_runner.keep_packed(find_cpu_model(config))
    assert [path.stat().st_ino for path in tmp_path.glob("*.packed")] == [inode]


def test_where_nothing_is_kept_nothing_is_made(tmp_path: Path) -> None:
    progress: list[str] = []
    config = EngineConfig(model=MODEL_DIR, repack_cache_dir="none")
    cpu_runner.keep_packed(find_cpu_model(config), lambda what, _, __: progress.append(what))
    assert progress == []
