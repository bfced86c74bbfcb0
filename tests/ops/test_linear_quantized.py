"""Products of int8 and fp8 weights and rows rounded alike; of int8, they are the CPU engine's."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core import _native  # noqa: E402
from lmi_core.ops.device.fp8_panels import pack_fp8, quantize_fp8  # noqa: E402
from lmi_core.ops.device.packed_weight import PackedWeight  # noqa: E402
from lmi_core.ops.device.quantized_rows import StaticFp8  # noqa: E402
from lmi_core.ops.kernels.torch_ops.linear_quantized import (  # noqa: E402
    quantize_rows as torch_quantize_rows,
)
from lmi_core.weights.formats import RowRounding  # noqa: E402
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import (  # noqa: E402
    DEVICES,
    fp8_tolerance,
    packed_weight,
    random,
    triton_module,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
IMPLEMENTATIONS = {
    "torch": "lmi_core.ops.kernels.torch_ops.linear_quantized",
    "triton": "lmi_core.ops.kernels.triton.linear_quantized",
    "native": "lmi_core.ops.kernels.cuda.linear_quantized",
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    """The module of the op, and of how it quantises rows."""
    if request.param == "native":
        use_cuda_kernels(device, monkeypatch)
    elif request.param == "triton":
        triton_module(device)
    importlib.import_module(IMPLEMENTATIONS[request.param])
    return sys.modules[IMPLEMENTATIONS[request.param]]


def on(device: torch.device, weight: PackedWeight) -> PackedWeight:
    return replace(weight, panels=weight.panels.to(device))


def same_weight_of_cpu(outputs: int, inputs: int) -> _native.LinearWeight:
    """What ``packed_weight`` packs, with gate above up."""
    return _native.LinearWeight.pack([random(outputs, inputs, seed=1).numpy()], format="int8")


def with_outliers(x: torch.Tensor) -> torch.Tensor:
    """Every second row with some numbers that are 10 to 600 times larger, each row its own."""
    for row in range(0, len(x), 2):
        columns = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(row))
        x[row, columns[: 1 + row % 5]] *= 10.0 + 59 * (row % 11)
    return x


@pytest.mark.parametrize("rounding", ["int8", "outliers"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 37, 128, 644])
def test_rows_are_those_of_the_cpu_engine(
    ops: ModuleType, device: torch.device, dtype: str, columns: int, rounding: RowRounding
) -> None:
    magnitudes = 10.0 ** torch.arange(-4.0, 5.0).repeat(3)[:20].unsqueeze(1)
    x = with_outliers(random(20, columns) * magnitudes / 500).to(DTYPES[dtype])
    x[2], x[5] = 0, 2.0**-120
    x[7, 0] = torch.inf
    rows = ops.quantize_rows(x.to(device), rounding)
    stride = -(-columns // 128) * 128
    expected = _native.kernels.quantize_rows("scalar", x.float().numpy(), rounding=rounding)
    assert np.array_equal(rows.codes.cpu().numpy(), expected[:, :stride].view(np.int8))
    words = expected[:, stride:].copy().view(np.int32)
    np.testing.assert_array_equal(rows.scales.cpu().numpy(), words[:, 0].view(np.float32))
    if rounding == "int8":
        assert rows.outliers is None
        return
    counts = rows.outliers[:, 0].cpu().numpy()
    assert np.array_equal(counts, words[:, 1])
    assert columns < 128 or counts.max() > 2
    for row, count in enumerate(counts):
        found = sorted(rows.outliers[row, 1 : 1 + count].tolist())
        assert found == words[row, 3 : 3 + count].tolist()


# Of either type the products' operands are codes, which are tried with both above.
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "is_gated", "dtype"),
    [
        (1, 64, 16, False, "fp32"),
        (5, 201, 41, False, "bf16"),
        (17, 1416, 70, True, "fp32"),
        (33, 130, 40, False, "bf16"),
        (64, 4100, 34, True, "bf16"),
        (65, 61, 7, False, "fp32"),
        (130, 200, 136, False, "fp32"),
        (200, 328, 300, True, "bf16"),
    ],
)
def test_products_are_those_of_the_cpu_engine(
    ops: ModuleType,
    device: torch.device,
    rows: int,
    inputs: int,
    outputs: int,
    is_gated: bool,
    dtype: str,
) -> None:
    weight, unpacked = packed_weight(outputs, inputs, 0, is_gated)
    x = with_outliers(random(rows, inputs)).to(DTYPES[dtype])
    bias = random(outputs, seed=2)
    cpu_weight = same_weight_of_cpu(outputs, inputs)
    assert np.array_equal(cpu_weight.unpack(), unpacked.float().numpy())
    np.testing.assert_array_equal(weight.unpack().numpy(), cpu_weight.unpack())
    for offset in (None, bias):
        expected = _native.kernels.linear(
            "scalar", x.float().numpy(), cpu_weight, bias=None if offset is None else offset.numpy()
        )
        y = ops.linear_quantized(
            x.to(device), on(device, weight), None if offset is None else offset.to(device)
        )
        assert y.dtype == torch.float32
        np.testing.assert_allclose(y.cpu().numpy(), expected, rtol=3e-7, atol=1e-6)


def test_codes_at_their_limits_do_not_overflow(ops: ModuleType, device: torch.device) -> None:
    """Every product is 127^2 in magnitude, and a long row's sum needs 31 bits."""
    inputs = 65536
    sign = torch.where(random(3, inputs) > 0, 1.0, -1.0)
    weight = _native.LinearWeight.pack([sign.numpy()], format="int8")
    packed = PackedWeight(
        panels=torch.frombuffer(bytearray(weight.packed()), dtype=torch.uint8),
        format="int8",
        num_outputs=3,
        num_inputs=inputs,
        group_size=0,
        is_gated=False,
    )
    y = ops.linear_quantized(sign[:2].to(device), on(device, packed), None)
    expected = _native.kernels.linear("scalar", sign[:2].numpy(), weight)
    np.testing.assert_allclose(y.cpu().numpy(), expected, rtol=3e-7)
    assert y[0, 0].item() == pytest.approx(inputs, rel=1e-3)


def test_no_rows(ops: ModuleType, device: torch.device) -> None:
    weight, _ = packed_weight(20, 64, 0, False)
    y = ops.linear_quantized(torch.empty(0, 64, device=device), on(device, weight), None)
    assert y.shape == (0, 20)


def test_rows_that_are_not_finite_stay_so(ops: ModuleType, device: torch.device) -> None:
    weight, _ = packed_weight(20, 64, 0, False)
    x = random(3, 64)
    x[1, 5] = torch.nan
    y = ops.linear_quantized(x.to(device), on(device, weight), None).cpu()
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("rows", [40, 150])
def test_a_row_is_what_it_is_alone(ops: ModuleType, device: torch.device, rows: int) -> None:
    """Sums are exact, so that neither tiles nor the rows beside it can show."""
    weight, _ = packed_weight(72, 300, 0, False)
    x = with_outliers(random(rows, 300)).to(device, torch.bfloat16)
    y = ops.linear_quantized(x, on(device, weight), None)
    for row in (0, 17, rows - 1):
        alone = ops.linear_quantized(x[row : row + 1], on(device, weight), None)
        assert torch.equal(alone[0], y[row])


def test_torch_gives_the_bits_of_the_cpu_engine() -> None:
    from lmi_core.ops.kernels.torch_ops.linear_quantized import linear_quantized

    weight, _ = packed_weight(70, 1416, 0, True)
    cpu_weight = same_weight_of_cpu(70, 1416)
    x = with_outliers(random(9, 1416)).to(torch.bfloat16)
    bias = random(70, seed=2)
    expected = _native.kernels.linear("scalar", x.float().numpy(), cpu_weight, bias=bias.numpy())
    assert np.array_equal(linear_quantized(x, weight, bias).numpy(), expected)


def fp8_weight(
    outputs: int, inputs: int, is_grouped: bool, is_gated: bool
) -> tuple[PackedWeight, torch.Tensor]:
    """A random one, and its values in float64."""
    codes = random(outputs, inputs, seed=1).mul(100).to(torch.float8_e4m3fn)
    num_groups = -(-inputs // 128) if is_grouped else 1
    scales = random(outputs, num_groups, seed=3).abs() + 0.01
    parts = list(zip(codes.chunk(2), scales.chunk(2), strict=True)) if is_gated else None
    spread = scales.repeat_interleave(128 if is_grouped else inputs, 1)[:, :inputs]
    weight = pack_fp8(parts or [(codes, scales)], is_gated=is_gated)
    return weight, codes.double() * spread.double()


@pytest.mark.parametrize("columns", [1, 37, 644])
@pytest.mark.parametrize("fixed", [0.0, 0.03])
def test_rows_in_fp8(ops: ModuleType, device: torch.device, columns: int, fixed: float) -> None:
    """By a scale of each, or one for all, which clips the larger ones."""
    magnitudes = 10.0 ** torch.arange(-4.0, 5.0).unsqueeze(1)
    x = (random(9, columns) * magnitudes).to(torch.bfloat16)
    x[2] = 0
    x[7, 0] = torch.nan
    rows = ops.quantize_rows(x.to(device), StaticFp8(fixed) if fixed else "fp8")
    codes, scales = rows.codes.cpu().view(torch.uint8), rows.scales.cpu()
    assert not codes[:, columns:].any()
    usable = [0, 1, 3, 4, 5, 6, 8]
    most = x.float().abs().amax(1)
    wanted = torch.full_like(most, fixed) if fixed else most / 448
    np.testing.assert_array_equal(scales[usable], wanted[usable])
    assert scales[2] == 0
    assert scales[7].isnan()
    assert not codes[[2, 7]].any()
    assert not fixed or columns == 1 or most[8] > 448 * fixed
    inside = (x.float() * (1 / wanted).unsqueeze(1)).clamp(-448, 448)
    expected = inside[usable].to(torch.float8_e4m3fn)
    assert torch.equal(codes[usable, :columns], expected.view(torch.uint8))


def test_a_weight_may_say_the_scale_of_its_rows(ops: ModuleType, device: torch.device) -> None:
    weight, exact = fp8_weight(48, 256, False, False)
    x = random(5, 256).to(torch.bfloat16)
    fixed = replace(weight, row_scale=0.005)
    codes = (x.float() / 0.005).clamp(-448, 448).to(torch.float8_e4m3fn)
    expected = codes.double() * 0.005 @ exact.T
    assert (x.float().abs() > 448 * 0.005).any(), "some are clipped"
    y = ops.linear_quantized(x.to(device), on(device, fixed), None).cpu().double()
    part = fp8_tolerance(device, ops)
    np.testing.assert_allclose(y, expected, rtol=part, atol=part * expected.abs().max().item())


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "is_gated"),
    [
        (1, 128, 16, False),
        (5, 201, 41, False),
        (17, 1416, 70, True),
        (64, 2100, 34, True),
        (65, 61, 7, False),
        (130, 200, 136, False),
        (200, 328, 300, True),
    ],
)
def test_products_of_fp8(
    ops: ModuleType,
    device: torch.device,
    rows: int,
    inputs: int,
    outputs: int,
    is_gated: bool,
    is_grouped: bool,
) -> None:
    weight, exact = fp8_weight(outputs, inputs, is_grouped, is_gated)
    np.testing.assert_allclose(weight.unpack().double(), exact, rtol=1e-6)
    x, bias = random(rows, inputs).to(torch.bfloat16), random(outputs, seed=2)
    rounded = torch_quantize_rows(x, "fp8")
    values = rounded.codes[:, :inputs].double() * rounded.scales.double().unsqueeze(1)
    expected = values @ exact.T
    part = fp8_tolerance(device, ops)
    tolerance = {"rtol": part, "atol": part * expected.abs().max().item()}
    y = ops.linear_quantized(x.to(device), on(device, weight), None)
    assert y.dtype == torch.float32
    np.testing.assert_allclose(y.cpu().double(), expected, **tolerance)
    y = ops.linear_quantized(x.to(device), on(device, weight), bias.to(device))
    np.testing.assert_allclose(y.cpu().double(), expected + bias.double(), **tolerance)


def test_every_fp8_number_is_read(ops: ModuleType, device: torch.device) -> None:
    """Also the smallest, and NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(256, 1)
    weight = pack_fp8([(codes, torch.ones(256, 1))], is_gated=False)
    y = ops.linear_quantized(torch.full((1, 1), 448.0, device=device), on(device, weight), None)
    np.testing.assert_array_equal(y.cpu()[0], codes.float()[:, 0] * 448)


def test_weights_quantised_to_fp8() -> None:
    """To the nearest multiples of a scale per row; zeros stay."""
    matrix = random(6, 130) * 10.0 ** torch.arange(-3.0, 3.0).unsqueeze(1)
    matrix[2] = 0
    codes, scales = quantize_fp8(matrix)
    values = codes.float() * scales
    largest = matrix.abs().amax(1, keepdim=True)
    np.testing.assert_allclose(values.abs().amax(1, keepdim=True), largest, rtol=1e-6)
    assert ((values - matrix).abs() <= 2**-4 * matrix.abs() + largest * 2**-18).all()
    assert not values[2].any()
    weight = pack_fp8([(codes, scales)], is_gated=False)
    np.testing.assert_allclose(weight.unpack(), values, rtol=1e-6)
