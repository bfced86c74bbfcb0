"""Attention in every implementation that this process can run, against float64.

Triton kernels run on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1 is set for a process
of its own: ``make test-triton``. CUDA kernels run on a GPU, or in the emulator of
tests/cuda_emulator.
"""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import (  # noqa: E402
    DTYPES,
    NATIVE,
    TOLERANCES,
    assert_close,
    device,
    ops,
    random,
    triton_ops,
)
from tests.ops.paged_case import ATTENTION_CASES, NATIVE_CASES, PagedCase  # noqa: E402

__all__ = ["device", "ops", "triton_ops"]  # fixtures


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (7, 0.0), (20, 5.0)])
@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention(
    ops: ModuleType, device: torch.device, dtype: str, window: int, soft_cap: float, name: str
) -> None:
    case = ATTENTION_CASES[name]
    keys, values = case.cache(device, DTYPES[dtype], is_filled=True)
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device, DTYPES[dtype])
    settings = {"scale": case.head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    y = ops.attention(q, keys, values, case.step(device), num_q_heads=case.num_q_heads, **settings)
    assert_close(y, case.expected_attention(q, keys, values, **settings), dtype)


def of_heads(case: PagedCase) -> dict[str, torch.Tensor]:
    """Slopes and sinks."""
    slopes = 2.0 ** -torch.arange(1, case.num_q_heads + 1)
    return {"slopes": slopes, "sinks": random(case.num_q_heads, seed=8) * 3}


@pytest.mark.parametrize("names", [("slopes",), ("sinks",), ("slopes", "sinks")])
@pytest.mark.parametrize(("dtype", "window", "soft_cap"), [("fp32", 0, 0.0), ("bf16", 20, 5.0)])
@pytest.mark.parametrize("name", ["decode", "chunks", "mixed"])
def test_slopes_and_sinks(
    ops: ModuleType,
    device: torch.device,
    dtype: str,
    window: int,
    soft_cap: float,
    name: str,
    names: tuple[str, ...],
) -> None:
    case = ATTENTION_CASES[name]
    keys, values = case.cache(device, DTYPES[dtype], is_filled=True)
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device, DTYPES[dtype])
    settings = {"scale": case.head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    chosen = {name: of_heads(case)[name] for name in names}
    placed = {name: tensor.to(device) for name, tensor in chosen.items()}
    step = case.step(device)
    y = ops.attention(q, keys, values, step, num_q_heads=case.num_q_heads, **settings, **placed)
    assert_close(y, case.expected_attention(q, keys, values, **settings, **chosen), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_latent", [True, False])
@pytest.mark.parametrize("group", [3, 16, 20])
def test_heads_that_are_wider(
    triton_ops: ModuleType,
    device: torch.device,
    dtype: str,
    is_latent: bool,
    group: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In two parts; over several splits, in chunks, and with keys that are the values, too."""
    module = importlib.import_module("lmi_core.ops.kernels.triton.attention")
    monkeypatch.setattr(module, "MIN_SPLIT_KEYS", 32)
    monkeypatch.setattr(module, "MAX_HEAD_DIM", 64)
    case = PagedCase(((99, 1), (0, 1), (40, 9), (0, 3)), group, 1, 88)
    keys, values = case.cache(device, DTYPES[dtype], is_filled=True)
    values = keys if is_latent else values
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device, DTYPES[dtype])
    settings = {"scale": 0.1, "window": 0, "soft_cap": 0.0}
    step = case.step(device)
    y = triton_ops.attention(q, keys, values, step, num_q_heads=case.num_q_heads, **settings)
    assert_close(y, case.expected_attention(q, keys, values, **settings), dtype)
    with pytest.raises(ValueError, match="heads of 88 with windows"):
        triton_ops.attention(q, keys, values, step, num_q_heads=group, **{**settings, "window": 3})


@pytest.mark.parametrize("window", [0, 50])
def test_attention_over_several_splits(
    triton_ops: ModuleType, device: torch.device, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long and short sequences side by side: the short ones' last splits are empty."""
    module = importlib.import_module("lmi_core.ops.kernels.triton.attention")
    monkeypatch.setattr(module, "MIN_SPLIT_KEYS", 32)
    case = PagedCase(((99, 1), (0, 1), (40, 1)), 2, 1, 16)
    keys, values = case.cache(device, torch.float32, is_filled=True)
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device)
    settings = {"scale": 0.25, "window": window, "soft_cap": 0.0, **of_heads(case)}
    y = triton_ops.attention(
        q, keys, values, case.step(device), num_q_heads=case.num_q_heads, **settings
    )
    assert_close(y, case.expected_attention(q, keys, values, **settings), "fp32")


@pytest.mark.parametrize(
    ("num_keys", "num_programs", "expected"),
    [
        (1, 1, (32, 1)),
        (511, 1, (512, 1)),
        (512, 1, (256, 2)),
        (5000, 8, (288, 18)),
        (100_000, 8, (3040, 33)),
        (100_000, 300, (100_000, 1)),
    ],
)
def test_choose_splits(
    triton_ops: ModuleType, num_keys: int, num_programs: int, expected: tuple[int, int]
) -> None:
    module = importlib.import_module("lmi_core.ops.kernels.triton.attention")
    assert module.choose_splits(num_keys, num_programs) == expected


@pytest.mark.parametrize(
    ("window", "soft_cap", "names"),
    [(0, 0.0, ()), (90, 5.0, ()), (0, 0.0, ("slopes", "sinks")), (90, 5.0, ("slopes", "sinks"))],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("name", NATIVE_CASES)
def test_native_attention(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    window: int,
    soft_cap: float,
    names: tuple[str, ...],
    name: str,
) -> None:
    """Shapes that the kernels take in different ways."""
    use_cuda_kernels(device, monkeypatch)
    ops = NATIVE
    case = NATIVE_CASES[name]
    keys, values = case.cache(device, dtype, is_filled=True)
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device, dtype)
    settings = {"scale": case.head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    settings |= {name: of_heads(case)[name].to(device) for name in names}
    y = ops.attention(q, keys, values, case.step(device), num_q_heads=case.num_q_heads, **settings)
    assert y.dtype == dtype
    expected = case.expected_attention(q, keys, values, **settings)
    np.testing.assert_allclose(y.double().cpu().numpy(), expected, **TOLERANCES["bf16"])


def test_native_attention_leaves_what_it_has_not(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_cuda_kernels(device, monkeypatch)
    ops = NATIVE
    case = PagedCase(((3, 1),), 2, 1, 20)
    keys, values = case.cache(device, torch.bfloat16, is_filled=True)
    q = random(1, 40).to(device, torch.bfloat16)
    settings = {"scale": 0.2, "window": 0, "soft_cap": 0.0}
    y = ops.attention(q, keys, values, case.step(device), num_q_heads=2, **settings)
    assert_close(y, case.expected_attention(q, keys, values, **settings), "bf16")
    assert "the CUDA kernel has no heads of 20" in caplog.text


def test_wide_heads_want_a_gpu_with_much_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("lmi_core.ops.kernels.cuda.attention")
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(shared_memory_per_block_optin=(99, 227)[device.index] << 10),
    )

    def reason(head_dim: int, device: str) -> str:
        bf16 = torch.bfloat16
        return str(module.not_covered(bf16, bf16, 4, head_dim, torch.device(device)))

    assert reason(128, "cuda:0") == "heads of 128 in this GPU's shared memory"
    given = (torch.bfloat16, torch.int8, 4, 64, torch.device("cpu"))
    assert module.not_covered(*given, is_plain=False) == "ALiBi or sinks over a cache of int8"
    assert reason(64, "cuda:0") == reason(256, "cuda:1") == reason(256, "cpu") == ""
    module._has_much_shared_memory.cache_clear()


@pytest.mark.parametrize(
    ("cached", "code", "widest"),
    [("float32", "", "float32"), ("bfloat16", "", "bfloat16"), ("int8", "int8", "bfloat16")],
)
def test_tiles_of_wide_heads_have_room_for_what_they_hold(
    cached: str, code: str, widest: str
) -> None:
    """Without codes, queries are converted to the cache's type."""
    pytest.importorskip("triton")
    module = importlib.import_module("lmi_core.ops.kernels.triton.wide_attention")
    cache = SimpleNamespace(tensors=[torch.zeros(1, dtype=getattr(torch, cached))], code=code)
    q = torch.zeros(1, dtype=torch.bfloat16)
    assert module.widest_dtype(q, cache) == getattr(torch, widest)
