"""The CUDA kernels' attention over caches of 8-bit codes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device.paged_cache import CacheScales, FixedScales  # noqa: E402
from tests.ops.coded_cache import CODES, FP8, coded_cache  # noqa: E402
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import NATIVE, TOLERANCES, device, random  # noqa: E402
from tests.ops.paged_case import NATIVE_CASES, PagedCase  # noqa: E402

__all__ = ["device"]  # a fixture

NATIVE_CODED_CASES = {**NATIVE_CASES, "rows of 8": PagedCase(((90, 1), (20, 70)), 6, 3, 120)}


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("name", NATIVE_CODED_CASES)
@pytest.mark.parametrize("stored", CODES)
def test_native_attention(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: torch.dtype,
    name: str,
    stored: str,
) -> None:
    """Shapes that the kernels take in different ways."""
    use_cuda_kernels(device, monkeypatch)
    ops = NATIVE
    case = NATIVE_CODED_CASES[name]
    codes, scales, read = coded_cache(case, device, stored)
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device, dtype)
    for window, soft_cap in ((0, 0.0), (90, 5.0)):
        settings = {"scale": case.head_dim**-0.5, "window": window, "soft_cap": soft_cap}
        y = ops.attention(
            q, *codes, case.step(device), num_q_heads=case.num_q_heads, scales=scales, **settings
        )
        assert y.dtype == dtype
        expected = case.expected_attention(q, *read, **settings)
        np.testing.assert_allclose(y.double().cpu().numpy(), expected, **TOLERANCES["bf16"])
    assert "the CUDA kernel has no" not in caplog.text


@pytest.mark.parametrize("stored", CODES)
@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
@pytest.mark.parametrize("is_decode", [False, True])
def test_native_attention_shows_what_is_not_finite(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    soft_cap: float,
    is_decode: bool,
) -> None:
    """A key that isn't finite spoils what sees it, and nothing else."""
    use_cuda_kernels(device, monkeypatch)
    ops = NATIVE
    case = PagedCase(((20, 1), (20, 1)) if is_decode else ((0, 21), (0, 21)), 2, 2, 16)
    codes, scales, _ = coded_cache(case, device, stored)
    slot = case.slots_of(case.arrays(), 0)[-1]
    if isinstance(scales, CacheScales):
        scales.keys[slot, 1] = torch.nan
    else:
        codes[0].view(torch.uint8)[slot, 1, 3] = 0x7F
    q = random(case.num_tokens, 32).to(device, torch.bfloat16)
    settings = {"scale": 0.25, "window": 0, "soft_cap": soft_cap}
    y = ops.attention(q, *codes, case.step(device), num_q_heads=2, scales=scales, **settings)
    expected = torch.zeros(case.num_tokens, 2, dtype=torch.bool)
    expected[0 if is_decode else 20, 1] = True
    assert torch.equal(y.cpu().view(-1, 2, 16).isnan().any(-1), expected)


@pytest.mark.parametrize("size", [1e-20, 1e6, 1e20])
@pytest.mark.parametrize("stored", FP8)
def test_native_attention_over_fp8_takes_queries_of_any_size(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, stored: str, size: float
) -> None:
    """Also of those that fp16 has no numbers for."""
    use_cuda_kernels(device, monkeypatch)
    ops = NATIVE
    case = PagedCase(((40, 1), (20, 12)), 12, 1, 64)
    codes, scales, read = coded_cache(case, device, stored)
    sizes = size * torch.logspace(-6, 0, 12).repeat_interleave(64)
    q = (random(case.num_tokens, 12 * 64) * sizes).to(device, torch.bfloat16)
    q[0, :64] = 0
    settings = {"scale": 0.2 / size, "window": 0, "soft_cap": 0.0}
    y = ops.attention(q, *codes, case.step(device), num_q_heads=12, scales=scales, **settings)
    expected = case.expected_attention(q, *read, **settings)
    np.testing.assert_allclose(y.double().cpu().numpy(), expected, **TOLERANCES["bf16"])


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("stored", CODES)
@pytest.mark.parametrize("is_decode", [False, True])
def test_native_attention_reads_every_code(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    is_decode: bool,
    stored: str,
    dtype: torch.dtype,
) -> None:
    """A row that sees one key gets its value, to the bit."""
    use_cuda_kernels(device, monkeypatch)
    ops = NATIVE
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(CODES[stored])
    numbers = codes.float().cpu()
    ones = torch.ones(16, 1, device=device)
    scales = CacheScales(ones, ones) if stored == "int8" else FixedScales(1.0, 1.0)
    settings = {"scale": 1.0, "window": 0, "soft_cap": 0.0, "scales": scales, "num_q_heads": 1}
    case = PagedCase(((0, 1 if is_decode else 2),), 1, 1, 256)
    slot = case.arrays().slots[0]
    keys, values = (torch.zeros(16, 1, 256, dtype=CODES[stored], device=device) for _ in range(2))
    values[slot, 0] = codes
    q = torch.zeros(case.num_tokens, 256, dtype=dtype, device=device)
    y = ops.attention(q, keys, values, case.step(device), **settings)
    np.testing.assert_array_equal(y[0].float().cpu(), numbers)
