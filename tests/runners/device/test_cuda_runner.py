"""Steps that C++ launches give, to the bit, what the same kernels give launched from Python: on a
GPU, or in the emulator of one."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmi_core.engine import loop
from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError
from lmi_core.structured.grammar import Grammar
from tests.checkpoints import make_checkpoint
from tests.engine.harness import assert_nothing_leaked, collect, run, until

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device import (  # noqa: E402
    eager,
    product_lowering,
    step_lowering,
    torch_weights,
)
from lmi_core.ops.device.recorded_steps import Node, RecordedSteps  # noqa: E402
from lmi_core.ops.device.step_list import StepListSizes  # noqa: E402
from lmi_core.ops.kernels.cuda import (  # noqa: E402
    cublaslt,
    library,
)
from lmi_core.runners.device import cuda_model  # noqa: E402
from lmi_core.runners.device.device_runner import load_device_runner  # noqa: E402
from tests.fp8_checkpoints import make_fp8_checkpoint  # noqa: E402
from tests.runners.device.cuda_harness import (  # noqa: E402
    CONFIG,
    CPP,
    PYTHON,
    STATES,
    TOTALS,
    assert_alike,
    assert_same,
    configured,
    device,
    outcomes,
    prompts,
    shrink_lists,
)
from tests.runners.device.torch_harness import requests  # noqa: E402

__all__ = ["device"]  # a fixture
pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("variant", ["llama2", "qwen3_window", "qwen2"])
def test_same_bits_as_launched_from_python(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked prompts with a common prefix, penalties, bans, filters, choices, prompt
    log-probabilities; waiting for free rows."""
    wanted = [(prompt, replace(params, max_new_tokens=4)) for prompt, params in requests()]
    assert_same(configured(variant, overlap=False), wanted, monkeypatch)


@pytest.mark.parametrize(
    "variant", ["gpt2", "gemma2", "gpt_neox", "opt_350m", "bloom", "cohere_plus", "olmo2"]
)
def test_other_nodes(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """LayerNorm, norms of sums and of heads, activations without gates, sums that follow one
    another, learned positions, soft caps, ALiBi."""
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
    wanted = [(prompt, params) for prompt in prompts(3, 20)]
    assert_same(configured(variant, overlap=False), wanted, monkeypatch)
    assert STATES, "C++ didn't launch the steps"


@pytest.mark.parametrize(
    ("variant", "quantize"),
    [("qwen2_moe", ""), ("gpt_oss", ""), ("phimoe", "int4"), ("glm4_moe", "int8")],
)
def test_experts(variant: str, quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated shared one; biases and clamped activations; SparseMixer's choice; groups' choice and
    dense layers."""
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
    wanted = [(prompt, params) for prompt in prompts(3, 20)]
    settings = {"quantize": quantize} if quantize else {}
    assert_same(configured(variant, overlap=False, **settings), wanted, monkeypatch)
    assert STATES, "C++ didn't launch the steps"


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("deepseek_v2", {}),
        ("deepseek_v3", {"quantize": "int8"}),
        ("deepseek_v3", {"kv_dtype": "int8"}),
    ],
)
def test_latent_attention(
    variant: str, settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a latent of queries. What torch gives, too, but for near ties."""
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
    wanted = [(prompt, params) for prompt in prompts(3, 20)]
    config = configured(variant, overlap=False, **settings)
    results = assert_same(config, wanted, monkeypatch)
    assert STATES, "C++ didn't launch the steps"
    monkeypatch.setenv("LMI_OPS", "torch")
    for events, others in zip(results, run(outcomes(config, wanted), 110), strict=True):
        assert [event.token_id for event in events] == [event.token_id for event in others]


def test_latents_of_wide_heads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As large as published models have them; in two chunks, then over several splits."""
    sizes = {"num_hidden_layers": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    model = make_checkpoint(tmp_path / "model", "deepseek_v3", dtype="bfloat16", **sizes)
    config = configured(
        overlap=False, max_model_len=400, max_num_batched_tokens=192, kv_cache_bytes=8 << 20
    )
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
    wanted = [(prompt, params) for prompt in prompts(340, 5)]
    assert_same(replace(config, model=model), wanted, monkeypatch)
    assert STATES, "C++ didn't launch the steps"


def test_the_runner_says_who_launches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def kernels(**changes: object) -> str:
        async with Engine(configured(**changes)) as engine:
            return engine.info.runner.kernels

    monkeypatch.setenv("LMI_OPS", CPP)
    assert run(kernels()).split("; ")[0].endswith(", launch")
    assert "launched from Python" not in caplog.text
    assert "launch" not in run(kernels(dtype="fp32"))
    assert "op by op, because of linear: the CUDA kernel has no float32 rows" in caplog.text
    assert "launch" not in run(kernels(gives_states=True))
    assert "because of sample: contrastive search reads hidden states" in caplog.text
    monkeypatch.setenv("LMI_OPS", "native,rms_norm:torch")
    assert "launch" not in run(kernels())
    assert "because of rms_norm: it runs in torch" in caplog.text
    caplog.clear()
    monkeypatch.setenv("LMI_OPS", PYTHON)
    assert "launch" not in run(kernels())
    assert "launched from Python" not in caplog.text


@pytest.mark.parametrize("quantize", ["int8", "int4", "fp8"])
def test_quantized_weights(quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
    wanted = [(prompt, params) for prompt in prompts(3, 20)]
    assert_same(configured(quantize=quantize, overlap=False), wanted, monkeypatch)


@pytest.mark.parametrize("quantize", ["int8", "fp8"])
def test_rows_quantized_on_the_way(quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By norms and activations: what kernels of their own give, in three nodes a layer less."""
    counts: list[Counter[str]] = []

    def note(nodes: list[Node], *others: Any) -> RecordedSteps:
        counts.append(Counter(node.name for node in nodes))
        return RecordedSteps(nodes, *others)

    monkeypatch.setattr(step_lowering, "RecordedSteps", note)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
    wanted = [(prompt, params) for prompt in prompts(3, 20)]
    config = configured(quantize=quantize, overlap=False)
    fused = assert_same(config, wanted, monkeypatch)
    for lowering in (eager, product_lowering):
        monkeypatch.setattr(lowering, "quantized_rows", lambda graph: {})
    assert_alike(fused, assert_same(config, wanted, monkeypatch))
    assert counts[-1] - counts[0] == {"quantize_rows": 3 * 3 + 1}  # of layers and the head
    assert counts[0] - counts[-1] == {}
    assert counts[0]["quantize_rows"] == 3  # of attention's results


@pytest.mark.parametrize("variant", ["llama2", "qwen3_moe"])
def test_scales_of_activations(
    variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those that a checkpoint has, for rows that norms and activations quantise, too."""
    model, _ = make_fp8_checkpoint(tmp_path / "model", "tensor", variant, num_hidden_layers=2)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
    wanted = [(prompt, params) for prompt in prompts(3, 20)]
    config = replace(configured(overlap=False), model=model)
    static = assert_same(config, wanted, monkeypatch)
    assert STATES, "C++ didn't launch the steps"
    monkeypatch.setattr(torch_weights, "common_row_scale", lambda parts: 0.0)
    own = assert_same(config, wanted, monkeypatch)
    logprobs = [[[e.logprob for e in events] for events in each] for each in (static, own)]
    assert logprobs[0] != logprobs[1]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3fn"])
def test_caches_of_8_bits(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second choice shares the prompt's blocks, and copies the last one."""
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, temperature=1.0, n=2, seed=3)
    wanted = [(prompt, params) for prompt in prompts(3, 20)]
    assert_same(configured(kv_dtype=kv_dtype, overlap=False), wanted, monkeypatch)


def test_long_contexts_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
    wanted = [(prompt, params) for prompt in prompts(340, 5)]
    config = configured(
        overlap=False, max_model_len=400, max_num_batched_tokens=384, kv_cache_bytes=8 << 20
    )
    assert_same(config, wanted, monkeypatch)


def test_preempted_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = 2 * 3 * 16 * 2 * 16 * 2  # keys, values; layers, tokens, heads, head size, bf16
    config = configured(overlap=False, max_model_len=48, kv_cache_bytes=5 * block_bytes)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=0)
    wanted = [(prompt, params) for prompt in prompts(12, 13, 14)]
    assert_same(config, wanted, monkeypatch)
    assert TOTALS[-1].num_preemptions > 0


def test_masks_of_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    pattern = "[a-f]{3}(-[0-9]{2}){2}"
    rules = SamplingParams(grammar=Grammar.regex(pattern), temperature=1.5, max_new_tokens=30)
    wanted = [((40,), replace(rules, seed=seed)) for seed in range(2)]
    wanted.append(((41,), SamplingParams(max_new_tokens=4, ignore_eos=True)))
    results = assert_same(configured(overlap=False), wanted, monkeypatch)
    for events in results[:2]:
        assert re.fullmatch(pattern, "".join(event.text for event in events))


def test_a_failed_step_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_lists(monkeypatch, max_tokens=16)
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)

    async def main() -> None:
        async with Engine(configured(), check_integrity=True) as engine:
            before = await collect(engine, [5, 6], params)
            with pytest.raises(EngineError, match="a step of 20 tokens, 1 sequences"):
                await collect(engine, list(range(9, 29)), params)
            after = await collect(engine, [5, 6], params)
            assert [e.token_id for e in after] == [e.token_id for e in before]
            assert engine.healthy
            await assert_nothing_leaked(engine)

    run(main())


def test_only_lists_that_ranks_start_together_have_shapes_to_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker that runs the widest step, while memory is measured, knows of no ranks."""
    nothing, much = (lambda: 0), (lambda: 1 << 40)
    gpu = SimpleNamespace(allocated_bytes=nothing, reserved_bytes=nothing, free_bytes=much)
    gpu.peak_bytes = gpu.start_peak = nothing
    gpu.total_bytes = much()
    monkeypatch.setattr(cuda_model, "memory_of", lambda _: gpu)
    shapes: list[bool] = []

    def noted(**wanted: Any) -> StepListSizes:
        shapes.append(bool(wanted["row_counts"] or wanted["key_counts"]))
        return StepListSizes(**wanted)

    monkeypatch.setattr(cuda_model, "StepListSizes", noted)
    monkeypatch.setenv("LMI_OPS", CPP)
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 32}
    runner, _ = load_device_runner(configured(enforce_eager=False, **small))
    runner.close()
    assert shapes == [False, True, True]


def test_shapes_that_cublaslt_has_no_algorithm_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The stand-in of cuBLASLt has none for so many inputs without a workspace."""
    if CONFIG.device == "cuda":
        pytest.skip("the library itself has an algorithm")
    monkeypatch.setattr(cublaslt, "WORKSPACE_BYTES", 256)
    model = make_checkpoint(
        tmp_path / "model",
        "llama2",
        dtype="bfloat16",
        num_hidden_layers=1,
        intermediate_size=1008,
    )
    config = replace(configured(overlap=False), model=model)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, logprobs=2)
    assert_same(config, [(prompt, params) for prompt in prompts(3, 20)], monkeypatch)
    assert "1008 inputs" in caplog.text
    assert "run in a plain kernel" in caplog.text


def test_notices_of_steps_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the kernels have to say of a shape may come up in any step."""
    if CONFIG.device == "cuda":
        pytest.skip("the library itself has an algorithm")
    monkeypatch.setenv("LMI_OPS", CPP)
    x, weight = torch.zeros(9, 1064).bfloat16(), torch.zeros(4, 1064).bfloat16()

    async def main() -> None:
        async with Engine(configured(), check_integrity=True) as engine:
            library.call(
                "linear_dense",
                x,
                x=x,
                weight=weight,
                y=torch.empty(9, 4),
                num_rows=9,
                num_outputs=4,
                num_inputs=1064,
                y_stride=4,
                dtype=x.dtype,
            )
            assert "1064 inputs" not in caplog.text
            await collect(engine, [5, 6], SamplingParams(max_new_tokens=2, ignore_eos=True))
            assert "products of 9 rows, 1064 inputs and 4 outputs run in a plain" in caplog.text

    run(main())


def test_closing_while_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMI_OPS", CPP)
    monkeypatch.setattr(loop, "MAX_AHEAD_S", 1e3)
    monkeypatch.setattr(loop, "LEAD_S", 1e3)
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)

    async def main() -> None:
        async with Engine(configured(enforce_eager=False)) as engine:
            tasks = [asyncio.create_task(collect(engine, [5, i], params)) for i in range(3)]
            await until(lambda: engine.stats().totals.num_generated_tokens > 4)
            await engine.stop(drain=False)
            await asyncio.gather(*tasks, return_exceptions=True)

    run(main())
    assert STATES
