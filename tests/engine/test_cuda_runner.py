"""Steps that C++ launches give, to the bit, what the same kernels give launched from Python: in the
emulator of a device."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from lmi_core.config.engine_config import EngineConfig
from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.sampling_params import SamplingParams
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import assert_nothing_leaked, collect, run

torch = pytest.importorskip("torch", exc_type=ImportError)

from tests.engine.test_torch_runner import config_of, requests  # noqa: E402
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402

CPP, PYTHON = "native", "native,launch:torch"
Request = tuple[tuple[int, ...], SamplingParams]


@pytest.fixture(autouse=True)
def _in_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    use_cuda_kernels(torch.device("cpu"), monkeypatch)


def configured(variant: str = "llama2", **changes: object) -> EngineConfig:
    model = cached_checkpoint(variant, dtype="bfloat16")
    settings = {"dtype": "auto", "enforce_eager": True, **changes}
    return config_of(model, "torch-cpu", **settings)


async def outcomes(config: EngineConfig, wanted: list[Request]) -> list[list[TokenEvent]]:
    async with Engine(config, check_integrity=True) as engine:
        results = await asyncio.gather(*(collect(engine, list(p), params) for p, params in wanted))
        await assert_nothing_leaked(engine)
    return [
        [replace(event, queue_seconds=0.0) for event in sorted(events, key=lambda e: e.choice)]
        for events in results
    ]


def assert_same(
    config: EngineConfig, wanted: list[Request], monkeypatch: pytest.MonkeyPatch
) -> list[list[TokenEvent]]:
    monkeypatch.setenv("LMI_OPS", PYTHON)
    expected = run(outcomes(config, wanted), 110)
    monkeypatch.setenv("LMI_OPS", CPP)
    results = run(outcomes(config, wanted), 110)
    assert results == expected
    return results


@pytest.mark.parametrize("variant", ["llama2", "qwen3_window"])
def test_same_bits_as_launched_from_python(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prompts with a common prefix, penalties, bans, filters, choices, prompt
    log-probabilities; waiting for free rows."""
    wanted = [(prompt, replace(params, max_new_tokens=4)) for prompt, params in requests()]
    config = configured(variant, overlap=False)
    assert_same(config, wanted, monkeypatch)
