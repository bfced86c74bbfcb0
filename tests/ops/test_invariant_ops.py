"""Kernels for any company: right against float64, and a row's bits are those it has alone."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device import packed_weight as limits  # noqa: E402
from lmi_core.ops.device.device_step import DeviceStep  # noqa: E402
from lmi_core.ops.kernels import select  # noqa: E402
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import (  # noqa: E402
    DEVICES,
    DTYPES,
    TOLERANCES,
    packed_weight,
    random,
)
from tests.ops.paged_case import PagedCase  # noqa: E402
from tests.ops.test_coded_caches import CODES, coded_cache  # noqa: E402
from tests.ops.test_device_attention import of_heads  # noqa: E402
from tests.ops.test_linear_quantized import fp8_weight  # noqa: E402


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=["triton"])
def ops(device: torch.device) -> ModuleType:
    pytest.importorskip("triton")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter wants a process of its own: make test-triton")
    return importlib.import_module("lmi_core.ops.kernels.triton.invariant")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(ops: ModuleType, device: torch.device, dtype: str, has_bias: bool) -> None:
    x, weight, bias = random(70, 150), random(40, 150, seed=1), random(40, seed=2)
    x, weight = x.to(device, DTYPES[dtype]), weight.to(device, DTYPES[dtype])
    offset = bias.to(device) if has_bias else None
    y = ops.linear(x, weight, offset)
    expected = x.double().cpu() @ weight.double().cpu().T + (bias.double() if has_bias else 0)
    np.testing.assert_allclose(y.cpu().double(), expected, atol=1e-4, rtol=1e-4)
    for first, count in ((0, 1), (3, 2), (17, 20), (64, 6)):
        assert torch.equal(ops.linear(x[first : first + count], weight, offset), y[first:][:count])
    assert ops.linear(x[:0], weight, offset).shape == (0, 40)


def test_linear_packed(
    ops: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of more rows than weights stay packed for elsewhere."""
    monkeypatch.setattr(limits, "MAX_PACKED_ROWS", 16)
    weight, unpacked = packed_weight(40, 200, 32, False)
    weight = replace(weight, panels=weight.panels.to(device))
    x = random(20, 200).to(device, torch.bfloat16)
    room = torch.empty(weight.unpacked_bytes, dtype=torch.uint8, device=device)
    y = ops.linear_packed(x, weight, None, unpacked=room)
    np.testing.assert_allclose(
        y.cpu().double(), x.double().cpu() @ unpacked.T, atol=1e-3, rtol=1e-3
    )
    for first, count in ((0, 1), (15, 2), (3, 17)):
        part = ops.linear_packed(x[first : first + count], weight, None, unpacked=room)
        assert torch.equal(part, y[first:][:count])


@pytest.mark.parametrize("group_size", [0, 128])
def test_linear_of_fp8(ops: ModuleType, device: torch.device, group_size: int) -> None:
    weight, _ = fp8_weight(40, 200, group_size > 0, False)
    weight = replace(weight, panels=weight.panels.to(device))
    x = random(70, 200).to(device, torch.bfloat16)
    y = ops.linear_quantized(x, weight, None)
    for first, count in ((0, 1), (15, 2), (3, 17)):
        part = ops.linear_quantized(x[first : first + count], weight, None)
        assert torch.equal(part, y[first:][:count])


@pytest.mark.parametrize("rounding", ["int8", "outliers"])
def test_native_linear_of_int8(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, rounding: Any
) -> None:
    """In panels of few rows and of many, and by cuBLASLt."""
    use_cuda_kernels(device, monkeypatch)
    weight, _ = packed_weight(40, 200, 0, False)
    weight = replace(weight, panels=weight.panels.to(device), rounding=rounding)
    x = random(150, 200)
    x[:, 7] *= 50
    x = x.to(device, torch.bfloat16)
    multiply = select.function("linear_quantized", "native")
    y = multiply(x, weight, None)
    for most in (64, 10_000):
        monkeypatch.setitem(limits.MAX_PANEL_ROWS, "int8", most)
        for first, count in ((0, 1), (15, 2), (3, 17), (0, 64), (60, 90)):
            part = multiply(x[first : first + count], weight, None)
            assert torch.equal(part, y[first:][:count]), (most, first)


CASES = {
    "decode": PagedCase(((0, 1), (31, 1), (32, 1), (70, 1)), 4, 2, 32),
    "chunks": PagedCase(((19, 18), (0, 2), (33, 16)), 6, 2, 24),
    "mixed": PagedCase(((40, 1), (16, 33), (3, 1)), 3, 1, 80),
}


MASKS = ((0, 0.0, False), (0, 0.0, True), (20, 5.0, True))


@pytest.mark.parametrize(
    ("dtype", "window", "soft_cap", "has_slopes"),
    [
        *((dtype, *mask) for dtype in ("fp32", "bf16") for mask in MASKS),
        *((codes, *MASKS[-1]) for codes in CODES),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_attention(
    ops: ModuleType,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    window: int,
    soft_cap: float,
    has_slopes: bool,
    name: str,
) -> None:
    """Small partitions, and few partial results at once: many of both."""
    module = importlib.import_module("lmi_core.ops.kernels.triton.invariant.attention")
    monkeypatch.setattr(module, "PARTITION_KEYS", 32)
    monkeypatch.setattr(module, "MAX_PARTIAL_BYTES", 1 << 15)
    case, act = CASES[name], DTYPES["fp32" if dtype == "fp32" else "bf16"]
    settings = settings_of(case, device, window, soft_cap, has_slopes=has_slopes)
    q, stored, scales, read = operands(case, device, dtype, act)
    step = case.step(device)

    def attend(queries: torch.Tensor, at: DeviceStep) -> torch.Tensor:
        y = ops.attention(
            queries, *stored, at, num_q_heads=case.num_q_heads, scales=scales, **settings
        )
        assert y.dtype == act
        return y

    assert_alike(attend, q, step)
    y = attend(q, step)
    tolerance = TOLERANCES["fp32" if dtype == "fp32" else "bf16"]
    expected = case.expected_attention(q, *read, **settings)
    np.testing.assert_allclose(y.cpu().double(), expected, **tolerance)


def settings_of(
    case: PagedCase, device: torch.device, window: int, soft_cap: float, *, has_slopes: bool
) -> dict[str, Any]:
    slopes = of_heads(case) if has_slopes else {}
    own = {name: tensor.to(device) for name, tensor in slopes.items()}
    return {"scale": 0.2, "window": window, "soft_cap": soft_cap, **own}


def operands(case: PagedCase, device: torch.device, dtype: str, act: torch.dtype) -> Any:
    """Queries; the keys and values of a cache of ``dtype`` as they are stored, their scales, and
    what is read of them."""
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device, act)
    if dtype in CODES:
        return q, *coded_cache(case, device, dtype)
    stored = case.cache(device, act)
    return q, stored, None, stored


def assert_alike(
    attend: Callable[[torch.Tensor, DeviceStep], torch.Tensor], q: torch.Tensor, step: DeviceStep
) -> None:
    """A row's result is that which it has alone."""
    y = attend(q, step)
    for row, alone in enumerate(step.single_rows()):
        assert torch.equal(attend(q[row : row + 1], alone)[0], y[row]), row


@pytest.mark.parametrize(
    ("dtype", "window", "soft_cap", "has_slopes"),
    [*(("bf16", *mask) for mask in MASKS), *((codes, 20, 5.0, False) for codes in CODES)],
)
@pytest.mark.parametrize("name", CASES)
def test_native_attention(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    window: int,
    soft_cap: float,
    has_slopes: bool,
    name: str,
) -> None:
    """Of prefills, which rows alone are, too."""
    use_cuda_kernels(device, monkeypatch)
    case = CASES[name]
    settings = settings_of(case, device, window, soft_cap, has_slopes=has_slopes)
    q, stored, scales, _ = operands(case, device, dtype, torch.bfloat16)
    native = partial(select.function("attention", "native"), prefills_all=True, **settings)

    def attend(queries: torch.Tensor, at: DeviceStep) -> torch.Tensor:
        y: torch.Tensor = native(queries, *stored, at, num_q_heads=case.num_q_heads, scales=scales)
        return y

    assert_alike(attend, q, case.step(device))
