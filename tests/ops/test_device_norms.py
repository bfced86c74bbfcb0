"""Norms with means and biases, of rows and of heads, and activations in every implementation that
this process can run, against float64; what runs where is as in test_device_attention.py."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from tests.ops import torch_formulas  # noqa: E402
from tests.ops.device_ops import DTYPES, assert_close, device, ops, random  # noqa: E402

__all__ = ["device", "ops"]  # fixtures
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")


def double(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.double()


def on(x: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if x is None else x.to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 7), (0, 16), (2, 5000)])
@pytest.mark.parametrize(
    ("kind", "has_weight", "has_bias", "is_added"),
    [
        ("layer", True, True, False),
        ("layer", True, False, True),
        ("layer", False, False, False),
        ("rms", False, False, True),
        ("rms", True, True, False),
        ("none", False, False, True),
    ],
)
def test_norm(
    ops: ModuleType,
    device: torch.device,
    dtype: str,
    rows: int,
    columns: int,
    kind: str,
    has_weight: bool,
    has_bias: bool,
    is_added: bool,
) -> None:
    x, addend = random(rows, columns) + 3, random(rows, columns, seed=1)
    weight = random(columns, seed=2) if has_weight else None
    bias = random(columns, seed=3) if has_bias else None
    wide = x.double() + (addend.double() if is_added else 0)
    value = x.to(device)
    y = ops.norm(
        value,
        on(weight, device),
        on(bias, device),
        1e-5,
        kind=kind,
        out_dtype=DTYPES[dtype],
        addend=addend.to(device) if is_added else None,
    )
    assert_close(y, torch_formulas.norm(wide, double(weight), double(bias), 1e-5, kind), dtype)
    assert_close(value, wide, "fp32")


@pytest.mark.parametrize(
    ("kind", "num_groups", "num_columns", "first_column"),
    [("rms", 1, 96, 0), ("layer", 3, 20, 20), ("layer", 4, 7, 5), ("rms", 1, 33, 8)],
)
def test_norm_heads(
    ops: ModuleType,
    device: torch.device,
    kind: str,
    num_groups: int,
    num_columns: int,
    first_column: int,
) -> None:
    x, size = random(5, 120), num_groups * num_columns
    weight = random(size, seed=1)
    bias = random(size, seed=2) if kind == "layer" else None
    settings = {"kind": kind, "first_column": first_column, "num_groups": num_groups}
    expected = x.double()
    y = ops.norm_heads(x.to(device), weight.to(device), on(bias, device), 1e-6, **settings)
    part = slice(first_column, first_column + size)
    groups = expected[:, part].reshape(5, num_groups, num_columns)
    scale = weight.double().view(num_groups, num_columns)
    offset = None if bias is None else bias.double().view(num_groups, num_columns)
    expected[:, part] = torch_formulas.norm(groups, scale, offset, 1e-6, kind).flatten(1)
    assert_close(y, expected, "fp32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "is_gated"),
    [(name, False) for name in ACTIVATIONS]
    + [(name, True) for name in (*ACTIVATIONS, "clamped_swiglu")],
)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 33), (2, 1032)])
def test_activations(
    ops: ModuleType,
    device: torch.device,
    dtype: str,
    activation: str,
    is_gated: bool,
    rows: int,
    columns: int,
) -> None:
    x = random(rows, 2 * columns if is_gated else columns) * 4
    x[0, 0] = -40.0  # where a naive exp overflows
    run = ops.gated_activation if is_gated else ops.activation
    y = run(x.to(device), activation, out_dtype=DTYPES[dtype])
    assert_close(y, torch_formulas.activated(x.double(), activation, is_gated), dtype)
    if dtype == "bf16":  # operands of the same numbers
        rounded = x.bfloat16().to(device)
        y = run(rounded.float(), activation, out_dtype=torch.bfloat16)
        assert torch.equal(run(rounded, activation, out_dtype=torch.bfloat16), y)


@pytest.mark.parametrize("columns", [3, 1028])
def test_bounds(ops: ModuleType, device: torch.device, columns: int) -> None:
    x = random(2, columns) * 20
    x[0, 0] = 1e6
    for op, expected in (
        (ops.soft_cap, 5 * (x.double() / 5).tanh()),
        (ops.clip, x.double().clamp(-5, 5)),
    ):
        value = x.clone().to(device)
        assert_close(op(value, 5.0), expected, "fp32")
        np.testing.assert_allclose(value.cpu(), expected, atol=3e-5)
