"""Norms and activations that quantise their results: to the bit what quantising them afterwards
gives, in every implementation that this process can run, but for Triton's norms on a GPU, of which
its compiler orders the sums by what is stored."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

import lmi_core.ops as graph_ops  # noqa: E402
from lmi_core.ops.device.eager import EagerGraph  # noqa: E402
from lmi_core.ops.device.quantized_rows import (  # noqa: E402
    CODE_TYPES,
    QuantizedRows,
    RowFormat,
    StaticFp8,
    stride_of,
)
from lmi_core.ops.device.torch_weights import DeviceWeight  # noqa: E402
from lmi_core.ops.graph import quantized_rows  # noqa: E402
from lmi_core.ops.kernels import select  # noqa: E402
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import (  # noqa: E402
    NATIVE,
    TORCH,
    device,
    ops,
    packed_weight,
    random,
)
from tests.ops.paged_case import PagedCase  # noqa: E402

__all__ = ["device", "ops"]  # fixtures
# Of NumPy, in which Triton's interpreter computes, about rows that aren't finite.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
formats = pytest.mark.parametrize("codes", ["int8", "outliers", "fp8", StaticFp8(0.01)], ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def quantize_rows(ops: ModuleType, x: torch.Tensor, codes: RowFormat) -> QuantizedRows:
    module = importlib.import_module(f"{ops.__name__}.linear_quantized")
    rows: QuantizedRows = module.quantize_rows(x, codes)
    return rows


def assert_same_rows(rows: QuantizedRows, expected: QuantizedRows) -> None:
    assert isinstance(rows, QuantizedRows)
    for part, other in zip(rows[:2], expected[:2], strict=True):
        assert (part.dtype, part.shape) == (other.dtype, other.shape)
    assert_same_outliers(rows.outliers, expected.outliers)
    assert torch.equal(rows.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(rows.scales.isnan(), expected.scales.isnan())
    assert torch.equal(rows.scales.nan_to_num(), expected.scales.nan_to_num())


def assert_same_outliers(outliers: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    """In any order."""
    if outliers is None or expected is None:
        assert outliers is expected is None
        return
    assert torch.equal(outliers[:, 0], expected[:, 0])
    places = torch.arange(outliers.shape[1], device=outliers.device)
    is_unused = places > outliers[:, :1]
    found, wanted = (entries.masked_fill(is_unused, 0) for entries in (outliers, expected))
    assert torch.equal(found.sort(1).values, wanted.sort(1).values)


def assert_near_rows(rows: QuantizedRows, expected: QuantizedRows) -> None:
    """Of inputs that differ in their last bits: codes of either type one step apart."""
    assert torch.equal(rows.scales.isnan(), expected.scales.isnan())
    scales, others = (values.scales.nan_to_num() for values in (rows, expected))
    torch.testing.assert_close(scales, others, rtol=1e-5, atol=0.0)
    codes, wanted = (values.codes.float() for values in (rows, expected))
    assert ((codes - wanted).abs() <= (wanted.abs() / 8).clamp(min=1.0)).all()
    assert (codes != wanted).float().mean() < 0.01


def extremes(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows of all magnitudes; then zeros, next to zeros, and one that isn't finite."""
    x = random(rows, columns, seed=seed) * 10.0 ** (torch.arange(rows) % 7 - 3.0).unsqueeze(1)
    for row, value in ((3, 0.0), (4, 2.0**-120)):
        if row < rows:
            x[row] = value
    if rows > 5:
        x[5, columns // 2] = torch.inf
    x[:, columns // 3 :: 97] *= 40.0
    return x


@formats
@dtypes
@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(7, 1), (1, 37), (7, 644), (2, 4096), (0, 16)])
def test_rms_norm(
    ops: ModuleType,
    device: torch.device,
    dtype: str,
    codes: RowFormat,
    rows: int,
    columns: int,
    is_added: bool,
) -> None:
    weight = random(columns, seed=2).to(device)
    addend = random(rows, columns, seed=1).to(device) if is_added else None
    x, other = (extremes(rows, columns).to(device) for _ in range(2))
    settings = {"out_dtype": DTYPES[dtype], "addend": addend}
    y = ops.rms_norm(x, weight, 1e-5, **settings)
    result = ops.rms_norm(other, weight, 1e-5, codes=codes, **settings)
    is_compiled = device.type == "cuda" and ops.__name__.endswith("triton")
    assert_alike = assert_near_rows if is_compiled and rows else assert_same_rows
    assert_alike(result, quantize_rows(ops, y, codes))
    assert torch.equal(other, x)


@formats
@dtypes
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "columns"), [(7, 1), (1, 130), (7, 644), (1, 17000), (0, 16)])
def test_gated_activation(
    ops: ModuleType,
    device: torch.device,
    dtype: str,
    codes: RowFormat,
    activation: str,
    rows: int,
    columns: int,
) -> None:
    gate_up = extremes(rows, 2 * columns).to(device)
    y = ops.gated_activation(gate_up, activation, out_dtype=DTYPES[dtype])
    result = ops.gated_activation(gate_up, activation, out_dtype=DTYPES[dtype], codes=codes)
    assert_same_rows(result, quantize_rows(ops, y, codes))


def test_rows_too_wide_for_the_kernel(ops: ModuleType, device: torch.device) -> None:
    """8192 columns where they are no multiple of 4."""
    gate_up = random(2, 2 * 8193).to(device)
    settings = {"out_dtype": torch.bfloat16}
    y = ops.gated_activation(gate_up, "silu", **settings)
    result = ops.gated_activation(gate_up, "silu", codes="int8", **settings)
    assert_same_rows(result, quantize_rows(ops, y, "int8"))


@formats
@pytest.mark.parametrize(("rows", "columns"), [(1, 32764), (130, 404)])
def test_activations_of_many_columns_or_rows(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, codes: RowFormat, rows: int, columns: int
) -> None:
    """Next to the most that the CUDA kernel has, and so many that a block has fewer threads."""
    use_cuda_kernels(device, monkeypatch)
    ops = NATIVE
    settings = {"out_dtype": torch.bfloat16}
    gate_up = extremes(rows, 2 * columns).to(device)
    y = ops.gated_activation(gate_up, "silu", **settings)
    result = ops.gated_activation(gate_up, "silu", codes=codes, **settings)
    assert_same_rows(result, quantize_rows(ops, y, codes))


@dtypes
def test_results_beside_their_codes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """The kernels give both where both are wanted."""
    use_cuda_kernels(device, monkeypatch)
    ops = NATIVE
    from lmi_core.ops.kernels.cuda import library

    x, weight = random(3, 2 * 300).to(device), random(2 * 300, seed=1).to(device)
    out_dtype = DTYPES[dtype]
    calls = {
        "rms_norm": ({"x": x, "weight": weight, "eps": 1e-5}, 600),
        "gated_activation": ({"gate_up": x, "activation": 0}, 300),
    }
    expected = {
        "rms_norm": ops.rms_norm(x, weight, 1e-5, out_dtype=out_dtype),
        "gated_activation": ops.gated_activation(x, "silu", out_dtype=out_dtype),
    }
    for name, (arguments, columns) in calls.items():
        y = torch.empty(3, columns, dtype=out_dtype, device=device)
        rows = QuantizedRows.empty(3, columns, "int8", device)
        library.call(
            name,
            x,
            **arguments,
            y=y,
            num_rows=3,
            num_columns=columns,
            y_dtype=out_dtype,
            codes=rows.codes,
            scales=rows.scales,
            stride=stride_of(columns),
            code_type=CODE_TYPES["int8"],
        )
        assert torch.equal(y, expected[name])
        assert_same_rows(rows, quantize_rows(ops, y, "int8"))


def test_products_take_them(ops: ModuleType, device: torch.device) -> None:
    weight, _ = packed_weight(40, 200, 0, False)
    weight = replace(weight, panels=weight.panels.to(device))
    x, scale = random(5, 200).to(device), random(200, seed=1).to(device)
    y = ops.rms_norm(x, scale, 1e-5, out_dtype=torch.bfloat16)
    rows = ops.rms_norm(x, scale, 1e-5, out_dtype=torch.bfloat16, codes=weight.row_format)
    expected = ops.linear_quantized(y, weight, None)
    assert torch.equal(ops.linear_quantized(rows, weight, None), expected)


@pytest.mark.parametrize("reads_too", [False, True])
def test_codes_are_recorded_where_nothing_else_reads(reads_too: bool) -> None:
    cpu = torch.device("cpu")
    graph = graph_ops.Graph("bf16")
    x = graph_ops.embed(graph, random(9, 64).numpy())
    h = graph_ops.rms_norm(x, np.ones(64, np.float32), 1e-5)
    packed, _ = packed_weight(40, 64, 0, False)
    y = graph_ops.linear(h, packed)
    if reads_too:
        graph_ops.linear(h, DeviceWeight(random(40, 64).bfloat16()))
    graph_ops.sample(y)
    assert quantized_rows(graph) == ({} if reads_too else {h: packed})
    steps = EagerGraph(graph, select.load(select.select("cpu", "torch")), cpu)
    step = PagedCase(((0, 3),), 1, 1, 16).step(cpu)
    logits = steps.forward(step)
    rows = TORCH.rms_norm(
        random(9, 64)[step.token_ids], torch.ones(64), 1e-5, out_dtype=torch.bfloat16
    )
    assert torch.equal(logits, TORCH.linear_quantized(rows, packed, None))


def test_codes_that_cannot_be(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.kernels.cuda import library

    x = random(2, 400).to(device)
    room = torch.empty(2, 512, dtype=torch.int8, device=device)
    scales = torch.empty(2, device=device)
    whole = {"gate_up": x, "num_rows": 2, "num_columns": 200, "scales": scales}
    good = {"codes": room, "stride": 256, "code_type": torch.int8}
    for changes, message in (
        ({"stride": 200}, "rows of 200 codes for 200 columns"),
        ({"stride": 128}, "rows of 128 codes for 200 columns"),
        ({"code_type": torch.bfloat16}, "code type 1; 3"),
        ({"codes": room.view(-1)[1:]}, "must start on 16 bytes"),
        ({"num_columns": 40000, "stride": 40064}, "codes of 40000 columns, 1 to 32768"),
    ):
        with pytest.raises(RuntimeError, match=message):
            library.call("gated_activation", x, **{**whole, **good, **changes})
