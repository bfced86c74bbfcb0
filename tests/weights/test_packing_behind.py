"""bf16 matrices that are packed while the engine uses them: the same bits before and after."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmi_core import _native
from lmi_core._native import LinearWeight, MappedFile, kernels
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.weights import repack_cache
from lmi_core.weights.packed_model import PackedModel
from tests.checkpoints import cached_checkpoint
from tests.kernels.bf16 import to_bf16

LEVELS = [level for level in _native.instruction_sets() if level != "amx"]
PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)


def stored(path: Path, matrices: list[npt.NDArray[np.uint16]]) -> list[npt.NDArray[np.uint16]]:
    """The same, at odd places in a file that is mapped."""
    path.write_bytes(b"ab" + b"".join(matrix.tobytes() for matrix in matrices))
    file, views, offset = MappedFile(str(path)), [], 2
    for matrix in matrices:
        view = file.array(offset, matrix.nbytes).view(np.uint16).reshape(matrix.shape)
        views.append(view)
        offset += matrix.nbytes
    return views


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("outputs", "num_inputs", "gated"),
    [([5], 1, False), ([64, 33, 7], 799, False), ([70, 70], 768, True), ([130], 1540, False)],
)
def test_products_are_the_same_before_and_after(
    tmp_path: Path, level: str, outputs: list[int], num_inputs: int, gated: bool
) -> None:
    rng = np.random.default_rng(0)
    parts = [to_bf16(rng.standard_normal((n, num_inputs), np.float32)) for n in outputs]
    packed = LinearWeight.pack(parts, format="bf16", gated=gated)
    behind = LinearWeight.pack(
        stored(tmp_path / "weights", parts), format="bf16", gated=gated, behind=True, num_threads=2
    )
    x = to_bf16(rng.standard_normal((97, num_inputs), np.float32))
    options = {"activation": "silu"} if gated else {}
    expected = [kernels.linear(level, x[:rows], packed, **options) for rows in (1, 7, 97)]
    for is_packed in (False, True):
        assert behind.is_packed == is_packed
        for y in expected:
            assert np.array_equal(kernels.linear(level, x[: len(y)], behind, **options), y)
        while not behind.pack_piece(2):
            assert not behind.is_packed
    assert np.array_equal(behind.packed(), packed.packed())


@pytest.mark.parametrize(("outputs", "gated"), [([3000, 2001], False), ([2405, 2405], True)])
def test_a_large_matrix_is_packed_in_pieces(
    tmp_path: Path, outputs: list[int], gated: bool
) -> None:
    rng = np.random.default_rng(1)
    parts = [rng.integers(0, 1 << 14, (n, 1999), np.uint16) for n in outputs]
    packed = LinearWeight.pack(parts, format="bf16", gated=gated)
    where = stored(tmp_path / "weights", parts)
    behind = LinearWeight.pack(where, format="bf16", gated=gated, behind=True)
    pieces = [behind.pack_piece(3)]
    while not pieces[-1]:
        assert not behind.is_packed
        pieces.append(behind.pack_piece(3))
    assert len(pieces) == 3
    assert behind.pack_piece(1)
    assert np.array_equal(behind.packed(), packed.packed())


def test_what_can_not_wait_is_packed_at_once(tmp_path: Path) -> None:
    bf16 = to_bf16(np.ones((16, 8), np.float32))
    [part] = stored(tmp_path / "weights", [bf16])
    for parts, options in (
        ([bf16], {"format": "bf16"}),
        ([part, bf16], {"format": "bf16"}),
        ([part], {"format": "fp32"}),
        ([part, part], {"format": "bf16", "num_experts": 2}),
    ):
        assert LinearWeight.pack(parts, behind=True, **options).is_packed  # type: ignore[arg-type]
    assert not LinearWeight.pack([part], format="bf16", behind=True).is_packed
    assert LinearWeight.pack([part], format="bf16").is_packed


def test_what_is_not_finite_is_known_at_once(tmp_path: Path) -> None:
    matrix = np.ones((16, 8), np.float32)
    matrix[15, 7] = np.inf
    [part] = stored(tmp_path / "weights", [to_bf16(matrix)])
    assert not LinearWeight.pack([part], format="bf16", behind=True).is_finite


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(repack_cache, "MIN_CHECKPOINT_BYTES", 0)
    directory = tmp_path / "model"
    shutil.copytree(cached_checkpoint("llama2", dtype="bfloat16"), directory)
    return directory


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No matrix is packed behind until it is set."""
    goes_on, pack = threading.Event(), PackedModel._pack_rest

    def wait(self: PackedModel) -> None:
        goes_on.wait()
        pack(self)

    with monkeypatch.context() as patched:
        patched.setattr(PackedModel, "_pack_rest", wait)
        try:
            yield goes_on
        finally:
            goes_on.set()


def config_of(model: Path, cache: Path | str) -> EngineConfig:
    return EngineConfig(
        model=model, repack_cache_dir=str(cache), kv_cache_bytes=1 << 20, num_threads=2
    )


async def generate(engine: Engine, first: int = 10) -> list[tuple[Any, Any]]:
    events = engine.generate(list(range(first, first + 40)), PARAMS)
    return [(event.token_id, event.logprob) async for event in events]


@pytest.mark.parametrize("is_kept", [True, False])
def test_texts_are_the_same_before_and_after(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    cache = tmp_path / "cache"

    async def run() -> None:
        with held_back(monkeypatch) as goes_on:
            async with Engine(config_of(model, cache if is_kept else "none")) as engine:
                [packed] = engine._parts.runner._packed
                assert not any(weight.is_packed for weight in packed._matrices.values())
                before = await generate(engine), await generate(engine, 11)
                assert not list(cache.glob("*"))
                goes_on.set()
                packed.wait()
                assert (await generate(engine), await generate(engine, 11)) == before
        assert len(list(cache.glob("*.packed"))) == is_kept
        async with Engine(config_of(model, cache)) as engine:
            assert (await generate(engine), await generate(engine, 11)) == before

    asyncio.run(run())


def test_an_engine_that_stops_leaves_the_rest_unpacked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        with held_back(monkeypatch) as goes_on:
            async with Engine(config_of(model, tmp_path / "cache")) as engine:
                [packed] = engine._parts.runner._packed
                matrices = list(packed._matrices.values())
                monkeypatch.setattr(packed._is_stopping, "set", _both(packed._is_stopping, goes_on))
        assert not any(weight.is_packed for weight in matrices)

    asyncio.run(run())
    assert not list((tmp_path / "cache").glob("*.packed"))


def _both(event: threading.Event, other: threading.Event) -> Any:
    set_it = event.set

    def set_both() -> None:
        set_it()
        other.set()

    return set_both


def test_a_checkpoint_that_changes_before_it_is_packed_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, [file] = tmp_path / "cache", model.glob("*.safetensors")

    async def run() -> None:
        with held_back(monkeypatch) as goes_on:
            async with Engine(config_of(model, cache)) as engine:
                file.write_bytes(file.read_bytes())
                goes_on.set()
                engine._parts.runner._packed[0].wait()

    asyncio.run(run())
    assert "changed before its weights were packed" in caplog.text
    assert not list(cache.glob("*.packed"))


@pytest.mark.parametrize("who_reads", ["a step", "packing"])
def test_a_file_that_is_truncated_before_it_is_packed_fails_the_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who_reads: str
) -> None:
    cache, [file] = tmp_path / "cache", model.glob("*.safetensors")

    async def run() -> None:
        with held_back(monkeypatch) as goes_on:
            async with Engine(config_of(model, cache)) as engine:
                os.truncate(file, 64)
                if who_reads == "packing":
                    goes_on.set()
                    engine._parts.runner._packed[0].wait()
                with pytest.raises(EngineError, match=f"{file.name} was truncated while it was"):
                    await generate(engine)
                assert not engine.healthy
                goes_on.set()

    asyncio.run(run())
    assert not list(cache.glob("*.packed"))
