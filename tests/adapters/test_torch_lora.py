"""LoRA adapters on torch devices: the lmi engine's tokens, and equal bits where promised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.settings.lora_config import LoraConfig
from tests.adapters.test_lora_invariance import adapters_of
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import run
from tests.lora_adapters import cached_adapter

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device.step_list import StepListState  # noqa: E402
from lmi_core.runners.device import decode_graphs  # noqa: E402
from lmi_core.runners.device.cuda_runner import CudaRunner  # noqa: E402
from tests.runners.device import test_torch_invariance as invariance  # noqa: E402
from tests.runners.device.test_decode_graphs import Rerun, capture  # noqa: E402, F401
from tests.runners.device.torch_harness import (  # noqa: E402
    DEVICES,
    assert_alike,
    config_of,
    outcomes,
    skip_without,
)

ADAPTERS = ("", "a", "b")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", ["llama3", "qwen3"])
def test_same_tokens_as_native(variant: str, device: str) -> None:
    skip_without(device)
    model, lora = cached_checkpoint(variant), adapters_of(variant)
    native = run(outcomes(config_of(model, "cpu", lora=lora), ADAPTERS))
    torch_events = run(outcomes(config_of(model, device, lora=lora), ADAPTERS), timeout_s=110)
    for events, others in zip(torch_events, native, strict=True):
        assert_alike(events, others)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [("llama3", "fp32"), ("qwen3", "bf16")],
)
def test_equal_bits_row_by_row(variant: str, dtype: str) -> None:
    stored = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    model = cached_checkpoint(variant, dtype=stored)
    lora = adapters_of(variant)
    config = invariance.config_of(model, "torch-cpu", dtype, lora=lora)
    requests = [
        replace(request, adapter=ADAPTERS[i % 3])
        for i, request in enumerate(invariance.make_requests((1, 16, 40, 33, 8), 4))
    ]
    conditions = ("many at once", "chunks of 7")  # what adapters don't change is others' test
    invariance.assert_equal_bits(config, requests, "by row: linear", conditions)


def test_captured_steps_are_those_of_the_base_model(capture: Rerun) -> None:  # noqa: F811
    """A step with an adapter in it runs op by op, others are replayed."""
    config = config_of(cached_checkpoint("llama3"), "torch-cpu", lora=adapters_of("llama3"))
    eager = replace(config, enforce_eager=True)
    for adapters in (("a",), ("",)):
        results = run(outcomes(config, adapters))
        assert bool(capture.num_replayed) == (adapters == ("",))
        for events, others in zip(results, run(outcomes(eager, adapters)), strict=True):
            assert_alike(events, others)


def test_steps_with_adapters_that_cpp_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both kinds of rows at once; what Python launches, but for the order of sums; captured, the
    same bits as launched one by one."""
    from tests.ops.cuda_kernels import use_cuda_kernels

    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    monkeypatch.setattr(decode_graphs, "NUM_MISSES", 1)
    model, lora = cached_checkpoint("llama2", dtype="bfloat16"), adapters_of("llama2")
    config = config_of(model, "torch-cpu", dtype="auto", lora=lora, overlap=False)
    eager = replace(config, enforce_eager=True)
    states: list[StepListState] = []
    close = CudaRunner.close

    def note_and_close(self: CudaRunner) -> None:
        if self._worker is not None:
            self._worker.drain()
            states.append(self._steps.list.state())
        close(self)

    monkeypatch.setattr(CudaRunner, "close", note_and_close)
    monkeypatch.setenv("LMI_OPS", "native")
    results = [run(outcomes(each, ADAPTERS), 110) for each in (config, eager)]
    assert [state.num_replayed > 0 for state in states] == [True, False]
    assert states[0].capture_error == ""
    for events, others in zip(*results, strict=True):
        assert [event.token_id for event in events] == [event.token_id for event in others]
        assert [event.logprob for event in events] == [event.logprob for event in others]
    monkeypatch.setenv("LMI_OPS", "native,launch:torch")
    python = run(outcomes(eager, ADAPTERS), 110)
    assert len(states) == 2
    for events, others in zip(results[1], python, strict=True):
        assert events[0].logprob == pytest.approx(others[0].logprob, abs=0.02)
    texts = {tuple(event.token_id for event in events) for events in results[0]}
    assert len(texts) == len(results[0]), "adapters change nothing"


def test_an_adapter_that_comes_and_goes_between_steps_of_cpp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.ops.cuda_kernels import use_cuda_kernels

    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    monkeypatch.setenv("LMI_OPS", "native")
    model = cached_checkpoint("llama2", dtype="bfloat16")
    config = config_of(model, "torch-cpu", dtype="auto", lora=LoraConfig(), enforce_eager=True)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)

    async def main() -> None:
        async with Engine(config) as engine:
            texts = []
            for seed in (1, 2, 1):  # each takes the slot that the one before it left
                await engine.load_adapter("c", cached_adapter("llama2", seed, rank=8))
                request = GenerationRequest(
                    request_id=f"by {seed}", prompt_token_ids=(5, 6, 7), params=params, adapter="c"
                )
                stream = engine.generate(request)
                texts.append([(event.token_id, event.logprob) async for event in stream])
                await engine.unload_adapter("c")
            assert texts[0] == texts[2] != texts[1]

    run(main(), 110)
