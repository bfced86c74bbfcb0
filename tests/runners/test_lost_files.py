"""A model's file that is truncated while it serves: that model fails by name, others go on."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, ModelError
from lmi_core.models.tensor_reader import TensorReader
from lmi_core.runners.cpu.cpu_runner import load_cpu_runner
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.weights import repack_cache
from tests.checkpoints import cached_checkpoint
from tests.loading import load_model

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=0)


def config_of(model: Path, cache: Path | str = "none") -> EngineConfig:
    return EngineConfig(
        model=model, kv_cache_bytes=1 << 20, num_threads=2, repack_cache_dir=str(cache)
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    shutil.copytree(cached_checkpoint("llama2", dtype="bfloat16"), directory)
    return directory


async def generate(engine: Engine) -> list[int | None]:
    prompt = list(range(10, 50))
    return [event.token_id async for event in engine.generate(prompt, PARAMS)]


@pytest.mark.parametrize("lost", ["checkpoint", "packed weights"])
def test_the_model_fails_and_others_go_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setattr(repack_cache, "MIN_CHECKPOINT_BYTES", 0)
    cache = tmp_path / "cache"

    if lost == "checkpoint":
        config, (file,) = config_of(model), model.glob("*.safetensors")
    else:
        config = config_of(model, cache)
        runner, _ = load_cpu_runner(config)
        for packed in runner._packed:
            packed.wait()
        runner.close()
        (file,) = cache.glob("*.packed")

    async def run() -> None:
        other = cached_checkpoint("llama2", dtype="bfloat16")
        async with Engine(config) as engine, Engine(config_of(other)) as beside:
            expected = await generate(engine)
            assert await generate(beside) == expected
            os.truncate(file, 64)
            with pytest.raises(EngineError, match=f"{file.name} was truncated while it was in use"):
                await generate(engine)
            assert not engine.healthy
            with pytest.raises(EngineError):
                await generate(engine)
            assert await generate(beside) == expected
            assert beside.healthy

    asyncio.run(run())


def test_what_is_truncated_while_it_is_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = model.glob("*.safetensors")
    first = TensorReader.vector

    def truncate_first(self: TensorReader, name: str):  # type: ignore[no-untyped-def]
        os.truncate(file, 4096)
        return first(self, name)

    monkeypatch.setattr(TensorReader, "vector", truncate_first)
    with pytest.raises(ModelError, match="was truncated while it was loaded"):
        load_model(model)
