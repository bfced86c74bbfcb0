"""With ``deterministic``, a torch device too gives equal bits whatever else it does."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.engine.harness import run
from tests.engine.random_drafts import SPECULATION, draft_at_random
from tests.engine.test_invariance import Outcome, Request, outcome, together
from tests.tiny_tokenizer import VOCAB_SIZE

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device import packed_weight  # noqa: E402
from lmi_core.runners.device import (  # noqa: E402
    decode_graphs,
    torch_runner,
)
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402

CONDITIONS: dict[str, dict[str, object]] = {
    "many at once": {},
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "prefixes from the cache": {"max_num_batched_tokens": 33, "max_num_seqs": 1},
    "plain loop, chunks of 64": {"overlap": False, "max_num_batched_tokens": 64},
}


def make_requests(lengths: tuple[int, ...], num_tokens: int) -> list[Request]:
    """Greedy and sampled in turn, some with a common prefix."""
    rng = random.Random(3)
    prefix = tuple(rng.randrange(4, VOCAB_SIZE) for _ in range(36))
    requests = []
    for i, length in enumerate(lengths):
        prompt = tuple(rng.randrange(4, VOCAB_SIZE) for _ in range(length))
        if i % 3 == 0:
            prompt = prefix + prompt[: length // 2]
        is_sampled = i % 2 == 1
        params = SamplingParams(
            max_new_tokens=num_tokens + i % 3,
            temperature=0.9 if is_sampled else 0.0,
            top_k=20 if i % 4 == 1 else 0,
            top_p=0.9 if i % 4 == 1 else 1.0,
            typical_p=0.8 if i % 4 == 3 else 1.0,
            repetition_penalty=1.2 if i % 5 == 0 else 1.0,
            seed=50 + i,
            ignore_eos=True,
            logprobs=2,
        )
        requests.append(Request(prompt, params))
    return requests


def config_of(model: Path, device: str, dtype: str, **changes: object) -> EngineConfig:
    settings = {
        "model": model,
        "device": device,
        "dtype": dtype,
        "deterministic": True,
        "max_model_len": 320,
        "block_size": 16,
        "max_num_seqs": 16,
        "kv_cache_bytes": 16 << 20,
        "num_threads": 1,
        **changes,
    }
    return EngineConfig(**settings)  # type: ignore[arg-type]


async def alone(config: EngineConfig, requests: list[Request]) -> list[Outcome]:
    changed = replace(config, max_num_seqs=1, enable_prefix_caching=False)
    async with Engine(changed) as engine:
        return [await outcome(engine, request) for request in requests]


def assert_equal_bits(
    config: EngineConfig,
    requests: list[Request],
    kernels: str,
    conditions: tuple[str, ...] = tuple(CONDITIONS),
    num_disturbing: int = 2,
) -> None:
    expected = run(alone(config, requests), 110)
    for seed, name in enumerate(conditions):
        changes = CONDITIONS[name]
        changed = replace(config, **changes)  # type: ignore[arg-type]
        got, engine = run(together(changed, requests, seed, num_disturbing), 110)
        assert engine.info.runner.kernels.startswith(kernels)
        assert got == expected, name
        if name == "prefixes from the cache":
            assert engine.stats().totals.num_cached_tokens > 0


@pytest.mark.parametrize(
    ("variant", "dtype", "changes", "conditions"),
    [
        ("llama3", "fp32", {}, tuple(CONDITIONS)),
        ("qwen3", "bf16", {}, ("chunks of 7", "plain loop, chunks of 64")),
        ("mistral", "bf16", {"kv_dtype": "int8"}, ("chunks of 7", "prefixes from the cache")),
        ("llama2", "bf16", {"kv_dtype": "fp8_e5m2"}, ("many at once", "prefixes from the cache")),
        ("llama3", "bf16", {"quantize": "int8"}, ("chunks of 7",)),
    ],
)
def test_torch_row_by_row(
    variant: str, dtype: str, changes: dict[str, object], conditions: tuple[str, ...]
) -> None:
    stored = {"fp32": "float32", "bf16": "bfloat16"}[dtype]
    model = cached_checkpoint(variant, dtype=stored)
    config = config_of(model, "torch-cpu", dtype, **changes)
    # Products with codes take long, and know nothing of caches.
    lengths = (1, 16, 9) if "quantize" in changes else (1, 16, 40, 33, 8)
    assert_equal_bits(config, make_requests(lengths, 4), "by row: linear", conditions)


def test_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and wrong ones, beside sequences that run ahead."""
    config = config_of(cached_checkpoint("llama3"), "torch-cpu", "fp32")
    requests = make_requests((1, 16, 40, 33, 8), 12)
    expected = run(alone(config, requests), 110)
    truths = {
        (request.prompt, request.params.seed, 0): [token_id for token_id, *_ in outcome]
        for request, outcome in zip(requests, expected, strict=True)
    }
    draft_at_random(monkeypatch, truths, VOCAB_SIZE)
    for overlap in (True, False):
        changed = replace(config, speculation=SPECULATION, overlap=overlap)
        got, engine = run(together(changed, requests, 3, 2), 110)
        assert got == expected
        totals = engine.stats().totals
        assert 0 < totals.num_accepted_tokens < totals.num_draft_tokens


@pytest.fixture
def interpreted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One layer with norms of heads and a window, over several partitions of the keys."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter wants a process of its own: make test-triton")
    pytest.importorskip("triton")
    module = importlib.import_module("lmi_core.ops.kernels.triton.invariant.attention")
    monkeypatch.setattr(module, "PARTITION_KEYS", 32)
    monkeypatch.setenv("LMI_OPS", "triton")
    return make_checkpoint(
        tmp_path / "model", "qwen3_window", num_hidden_layers=1, max_window_layers=0
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kv_dtype", "condition", "lengths"),
    [
        ("int8", "chunks of 7", (1, 20, 9)),
        ("fp8_e4m3fn", "prefixes from the cache", (1, 12, 5, 8)),
    ],
)
def test_triton(interpreted: Path, kv_dtype: str, condition: str, lengths: tuple[int, ...]) -> None:
    config = config_of(interpreted, "torch-cpu", "fp32", kv_dtype=kv_dtype)
    requests = make_requests(lengths, 1)
    assert_equal_bits(config, requests, "invariant: linear", (condition,), num_disturbing=0)


@pytest.mark.timeout(240)
def test_triton_in_captured_steps(interpreted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded rows and contexts change nothing; capturing is a stand-in."""
    num_replayed = 0

    def capture(launch: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            nonlocal num_replayed
            num_replayed += 1
            launch()

        launch()
        return replay

    monkeypatch.setattr(torch_runner, "make_capture", lambda *_: capture)
    monkeypatch.setattr(decode_graphs, "NUM_MISSES", 1)
    monkeypatch.setattr(decode_graphs, "FIRST_NUM_KEYS", 32)
    config = config_of(interpreted, "torch-cpu", "fp32", max_model_len=64, max_num_seqs=3)
    requests = make_requests((20, 5, 9), 3)
    captured, _ = run(together(config, requests, 0, num_disturbing=0), 110)
    assert num_replayed >= 2
    monkeypatch.setattr(torch_runner, "make_capture", lambda *_: None)
    assert captured == run(alone(config, requests), 110)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
@pytest.mark.parametrize("kernels", ["", "torch"])
@pytest.mark.parametrize(
    "changes", [{}, {"kv_dtype": "int8", "quantize": "int4"}, {"kv_dtype": "fp8_e4m3fn"}]
)
def test_gpu(monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], kernels: str) -> None:
    monkeypatch.setenv("LMI_OPS", kernels)
    model = cached_checkpoint("qwen3", dtype="bfloat16")
    config = config_of(model, "cuda", "bf16", **changes)
    start = "by row" if kernels == "torch" else "invariant"
    assert_equal_bits(config, make_requests((1, 16, 40, 75, 270, 8), 6), f"{start}: linear")


NATIVE = "native tiles: linear, grouped_linear, attention; native: "


@pytest.mark.parametrize(
    ("variant", "changes", "condition"),
    [
        ("llama3", {"quantize": "int8"}, "prefixes from the cache"),
        ("llama3", {"quantize": "int4"}, "chunks of 7"),
        ("gemma2", {"quantize": "int8", "kv_dtype": "int8"}, "chunks of 7"),
        ("qwen3", {"kv_dtype": "fp8_e4m3fn"}, "chunks of 7"),
        ("mixtral", {"quantize": "int8"}, "chunks of 7"),
        ("qwen3_moe", {}, "chunks of 7"),
    ],
)
def test_native_kernels(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    changes: dict[str, object],
    condition: str,
) -> None:
    """Prompts reach the kernels for many rows, and chunks those for few."""
    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    monkeypatch.setenv("LMI_OPS", "native")
    monkeypatch.setattr(packed_weight, "MAX_PACKED_ROWS", 16)  # int4 isn't unpacked beyond
    model = make_checkpoint(tmp_path, variant, dtype="bfloat16", num_hidden_layers=1)
    config = config_of(model, "torch-cpu", "bf16", **changes)
    lengths = (1, 75) if condition == "chunks of 7" else (1, 16, 40, 75, 8)
    requests = make_requests(lengths, 1)
    assert_equal_bits(config, requests, NATIVE, (condition,), num_disturbing=1)


@pytest.mark.parametrize(
    ("variant", "dtype", "changes", "problem"),
    [
        ("llama3", "bf16", {"quantize": "fp8"}, "linear_quantized (of fp8 matrices)"),
        ("llama3", "fp32", {"quantize": "int8"}, "attention (float32 queries over"),
        ("deepseek_v2", "bf16", {"quantize": "int8"}, "attention (latent heads)"),
        ("mixtral", "bf16", {"quantize": "fp8"}, "linear_quantized (of fp8 matrices)"),
        ("llama3", "bf16", {"quantize": "int8", "lora": LoraConfig()}, "lora_add"),
    ],
)
def test_what_native_kernels_have_not_for_any_company(
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    dtype: str,
    changes: dict[str, object],
    problem: str,
) -> None:
    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    monkeypatch.setenv("LMI_OPS", "native")
    model = cached_checkpoint(variant, dtype="bfloat16")

    async def start() -> None:
        async with Engine(config_of(model, "torch-cpu", dtype, **changes)):
            pass

    with pytest.raises(UserError, match="LMI_OPS=native doesn't go with deterministic") as caught:
        run(start())
    assert f"native kernels of {problem}" in str(caught.value)


def test_single_native_kernels_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start() -> None:
        async with Engine(config_of(tmp_path, "torch-cpu", "fp32")):
            pass

    monkeypatch.setenv("LMI_OPS", "attention:native")
    with pytest.raises(UserError, match="LMI_OPS=attention:native doesn't go with deterministic"):
        run(start())


def test_the_log_says_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    async def start() -> None:
        config = config_of(cached_checkpoint("llama3"), "torch-cpu", "fp32")
        async with Engine(config):
            pass

    with caplog.at_level("INFO"):
        run(start())
    assert "deterministic: by row: linear, linear_packed, linear_quantized" in caplog.text
