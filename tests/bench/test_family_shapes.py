"""Shapes of other families: what a step reads of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import family_shapes
from bench.checkpoints import SHAPES
from tests.loading import load_model


def test_a_mixtures_step_reads_the_experts_that_its_rows_choose() -> None:
    shape = family_shapes.shape_of("mixture-1")
    expert = 3 * 2048 * 768
    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    others = attention + 2048 * 128 + 2048 * 32000
    assert shape.linear_params == others + 8 * expert == shape.params_read(1)
    distinct = (shape.params_read(8) - others) / expert
    assert distinct == pytest.approx(128 * (1 - (1 - 8 / 128) ** 8))
    assert SHAPES["160m"].params_read(8) == SHAPES["160m"].linear_params


@pytest.mark.parametrize("name", ["gpt2", "mixture-zipf"])
def test_checkpoints_load(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 512}
    sizes |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 8}
    config = family_shapes.CONFIGS[name]
    small = {key: sizes.get(key, value) for key, value in config.items()}
    monkeypatch.setitem(family_shapes.CONFIGS, name, small)
    monkeypatch.setattr(family_shapes, "ROOT", tmp_path)
    assert load_model(family_shapes.checkpoint(name)).spec.num_layers == 2
