"""Embeddings and scores by torch devices are those of the CPU engine."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.engine.test_encoders import CLASSIFIER, join_pairs
from tests.engine.test_pooling import RAW, engine_of, in_a_loop, inputs
from tests.pooled_checkpoints import DECODERS, ENCODERS, decoder, encoder, write_modules

torch = pytest.importorskip("torch", exc_type=ImportError)

LENGTHS = (1, 2, 17, 60, 130, 257)
MODELS = {
    **{f"{name} decoder": decoder for name in DECODERS},
    **{f"{name} encoder": encoder for name in ENCODERS},
}


@pytest.mark.parametrize("name", MODELS)
@in_a_loop
async def test_vectors_are_those_of_the_cpu_engine(name: str) -> None:
    path = MODELS[name](name.split()[0])
    async with engine_of(path) as engine:
        wanted = [await engine.embed(ids, RAW) for ids in inputs(LENGTHS)]
    async with engine_of(path, device="torch-cpu", max_num_batched_tokens=300) as engine:
        assert not engine.info.runner.runs_ahead
        found = await asyncio.gather(*(engine.embed(ids, RAW) for ids in inputs(LENGTHS)))
        assert engine.stats().num_used_blocks == 0
    for vector, other in zip(found, wanted, strict=True):
        assert np.abs(vector - other).max() <= 1e-4 * other.std()


@pytest.mark.parametrize("mode", ["mean_tokens", "lasttoken"])
@in_a_loop
async def test_chunks_of_long_prompts(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(decoder("mistral"), path)
    write_modules(path, mode)
    async with engine_of(path) as engine:
        wanted = await engine.embed(inputs((130,))[0], RAW)
    async with engine_of(path, device="torch-cpu", max_num_batched_tokens=40) as engine:
        found = await engine.embed(inputs((130,))[0], RAW)
    assert np.abs(found - wanted).max() <= 1e-4 * wanted.std()


@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert"])
@in_a_loop
async def test_pairs_are_told_apart(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(encoder(name, CLASSIFIER), path)
    join_pairs(path)
    scores = []
    for device in ("cpu", "torch-cpu"):
        async with engine_of(path, device=device) as engine:
            scores.append(await engine.score("a fox", "sleeps near the river", raw=True))
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


@pytest.mark.parametrize("name", ["qwen3 decoder", "mpnet encoder"])
@in_a_loop
async def test_same_bits_in_any_batch_where_asked_for(name: str) -> None:
    settings = {"device": "torch-cpu", "deterministic": True, "dtype": "bf16"}
    path, asked = MODELS[name](name.split()[0]), inputs((1, 2, 15, 33, 60, 8))
    async with engine_of(path, **settings, max_num_seqs=1) as engine:
        alone = [(await engine.embed(ids)).tobytes() for ids in asked]
    order = random.Random(1).sample(range(len(asked)), len(asked))
    async with engine_of(path, **settings, max_num_batched_tokens=400) as engine:
        found = await asyncio.gather(*(engine.embed(asked[i]) for i in order))
    assert [vector.tobytes() for vector in found] == [alone[i] for i in order]
