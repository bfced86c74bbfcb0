"""A model taken through its layers one by one gives what the whole of it gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lmi_core.calibration.layer_runs import LayerRuns
from lmi_core.models.found_model import find_model
from lmi_core.models.spec import LayerLinear
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.weights.formats import FloatArray
from tests.checkpoints import cached_checkpoint
from tests.loading import load_model
from tests.models.forward import NativeForward, all_logits


def streams_behind(path: Path, sequences: list[list[int]]) -> tuple[LayerRuns, list[FloatArray]]:
    runs = LayerRuns(find_model(EngineConfig(model=path)), num_threads=2)
    try:
        streams = runs.embedded(sequences)
        for layer_id in range(runs.spec.num_layers):
            streams = runs.run(layer_id, runs.load(layer_id), streams)
    finally:
        runs.close()
    return runs, streams


@pytest.mark.parametrize("variant", ["llama3", "gpt2", "gemma2", "qwen2_moe", "gptj"])
def test_layers_one_by_one_give_the_models_logits(variant: str) -> None:
    path = cached_checkpoint(variant)
    random = np.random.default_rng(3)
    sequences = [random.integers(4, 380, length).tolist() for length in (40, 17)]
    _, streams = streams_behind(path, sequences)
    model = load_model(path, "fp32")
    norm, head = model.weights.final_norm, model.weights.head
    assert head is not None
    logits = all_logits(NativeForward(model, 64, "fp32"), sequences, max_chunk=64)
    for stream, expected in zip(streams, logits, strict=True):
        rows = stream.astype(np.float64)
        if model.spec.norm.kind == "layer":
            rows -= rows.mean(axis=1, keepdims=True)
        rows /= np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + model.spec.norm.eps)
        assert norm is not None
        rows = rows * norm.weight + (0 if norm.bias is None else norm.bias)
        found = rows @ head.weight.unpack().T.astype(np.float64)  # type: ignore[union-attr]
        found += 0 if head.bias is None else head.bias
        if model.spec.logit_soft_cap:
            found = model.spec.logit_soft_cap * np.tanh(found / model.spec.logit_soft_cap)
        assert found == pytest.approx(expected, abs=2e-4)


def test_what_a_linear_reads_gives_what_it_is_replaced_to_give() -> None:
    """The product of the inputs seen and another down projection is what the stream gains."""
    path = cached_checkpoint("llama3")
    runs = LayerRuns(find_model(EngineConfig(model=path)), num_threads=1)
    try:
        (stream,) = runs.embedded([list(range(10, 50))])
        seen: dict[LayerLinear, FloatArray] = {}
        (before,) = runs.run(0, runs.load(0), [stream], seen.__setitem__)
        assert set(seen) == set(LayerLinear)
        name = "model.layers.0.mlp.down_proj.weight"
        other = np.random.default_rng(1).standard_normal(
            (runs.spec.hidden_size, runs.spec.intermediate_size), np.float32
        )
        old = np.asarray(runs.reader.matrix(name), np.float32)
        (after,) = runs.run(0, runs.load(0, {name: other}), [stream])
        gained = seen[LayerLinear.DOWN] @ (other - old).T
        assert after - before == pytest.approx(gained, abs=1e-4)
    finally:
        runs.close()
