"""Matrix products in every implementation that this process can run, against float64; what runs
where is as in test_device_attention.py.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from tests.ops.cuda_kernels import (  # noqa: E402
    CUBLASLT_EMULATOR,
    EMULATOR,
    use_cuda_kernels,
)
from tests.ops.device_ops import (  # noqa: E402
    DTYPES,
    assert_close,
    device,
    largest_sum,
    ops,
    packed_weight,
    random,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["device", "ops"]  # fixtures


def operands(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, weight and bias of a dense product, and the rows times the weight in float64."""
    x, weight = random(rows, inputs).to(dtype), random(outputs, inputs, seed=1).to(dtype)
    return x, weight, random(outputs), x.double() @ weight.double().T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(device: torch.device, dtype: str, has_bias: bool) -> None:
    from lmi_core.ops.kernels.torch_ops.linear import linear

    x, weight, bias = random(5, 24), random(7, 24, seed=1), random(7, seed=2)
    x, weight = x.to(DTYPES[dtype]), weight.to(DTYPES[dtype])
    y = linear(x.to(device), weight.to(device), bias.to(device) if has_bias else None)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert_close(y, expected, "fp32", sums=largest_sum(x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 8, 1), (3, 264, 40), (8, 1000, 16), (5, 40, 7)]
)
def test_native_linear_of_few_rows(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rows: int,
    inputs: int,
    outputs: int,
) -> None:
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.kernels.cuda.linear import linear

    x, weight, bias, expected = operands(rows, inputs, outputs, dtype)
    y = linear(x.to(device), weight.to(device), None)
    assert_close(y, expected, "fp32")
    narrow = linear(x.to(device), weight.to(device), None, out_dtype=torch.bfloat16)
    assert torch.equal(narrow, y.bfloat16())
    y = linear(x.to(device), weight.to(device), bias.to(device))
    assert_close(y, expected + bias.double(), "fp32")
    for row in range(rows):  # whatever stands beside it
        alone = linear(x[row : row + 1].to(device), weight.to(device), bias.to(device))
        assert torch.equal(alone[0], y[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(9, 16, 24), (1, 1036, 3), (40, 64, 7)])
def test_linear_of_cublaslt(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rows: int,
    inputs: int,
    outputs: int,
) -> None:
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.kernels.cuda.cublaslt import linear_dense, unusable_because

    assert unusable_because() is None
    for seed in (1, 2):  # a shape's second product, of other operands
        x, weight = random(rows, inputs, seed=seed), random(outputs, inputs, seed=seed + 2)
        x, weight, bias = x.to(dtype), weight.to(dtype), random(outputs, seed=seed)
        expected = x.double() @ weight.double().T
        sums = largest_sum(x, weight)
        y = linear_dense(x.to(device), weight.to(device), None)
        assert_close(y, expected, "fp32", sums=sums)
        y = linear_dense(x.to(device), weight.to(device), bias.to(device))
        assert_close(y, expected + bias, "fp32", sums=sums)
        y = linear_dense(x.to(device), weight.to(device), None, out_dtype=torch.bfloat16)
        assert_close(y, expected, "bf16", sums=sums)
    with pytest.raises(RuntimeError, match=r"element type 1; .* without a bias can be had"):
        linear_dense(x.to(device), weight.to(device), bias.to(device), out_dtype=torch.bfloat16)


@pytest.mark.parametrize("offset", [1, 2, 8, 64])
def test_cublaslt_of_matrices_that_start_anywhere(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.kernels.cuda.cublaslt import linear_dense, unusable_because

    assert unusable_because() is None
    for start in (0, offset):
        buffer = random(start + 12 * 64 + 24 * 64).bfloat16().to(device)[start:]
        x, weight = buffer[: 12 * 64].view(12, 64), buffer[12 * 64 :].view(24, 64)
        y = linear_dense(x, weight, None)
        expected = x.cpu().double() @ weight.cpu().double().T
        assert_close(y, expected, "fp32", sums=largest_sum(x, weight))
    with pytest.raises(RuntimeError, match="bias must start on 16 bytes"):
        linear_dense(x, weight, torch.zeros(25, device=device)[1:])


def dense_product(name: str, x: Tensor, weight: Tensor, y: Tensor, bias: Tensor | None) -> None:
    """``y``: [R, any], whose first columns are written."""
    from lmi_core.ops.kernels.cuda import library

    workspace = torch.empty(4096, dtype=torch.uint8, device=x.device)
    library.call(
        name,
        x,
        x=x,
        weight=weight,
        bias=bias,
        y=y,
        workspace=workspace,
        workspace_bytes=0,
        num_rows=len(x),
        num_outputs=len(weight),
        num_inputs=x.shape[1],
        y_stride=y.shape[1],
        dtype=x.dtype,
        y_dtype=y.dtype,
    )


def test_cublaslt_is_asked_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where operands lie, to 256 bytes, is part of it."""
    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    from lmi_core.ops.kernels.cuda.cublaslt import unusable_because

    assert unusable_because() is None
    num_heuristics = ctypes.CDLL(str(CUBLASLT_EMULATOR)).cublaslt_num_heuristics
    x, weight, bias = random(12, 8).bfloat16(), random(5, 8).bfloat16(), random(5)
    room = torch.empty(61)
    y, shifted = room[:60].view(12, 5), room[1:].view(12, 5)
    before = num_heuristics()
    for _ in range(3):
        dense_product("linear_dense", x, weight, y, None)
        dense_product("linear_dense", x, weight, y, bias)
        dense_product("linear_dense", x[:11], weight, y, None)
    assert num_heuristics() == before + 3
    dense_product("linear_dense", x, weight, shifted, None)
    assert num_heuristics() == before + 4


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 8, 1), (70, 40, 130), (64, 64, 64), (9, 37, 66), (130, 3, 5), (12, 1416, 24)],
)
def test_native_linear_in_tiles(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rows: int,
    inputs: int,
    outputs: int,
) -> None:
    use_cuda_kernels(device, monkeypatch)
    x, weight, bias, expected = operands(rows, inputs, outputs, dtype)
    y = torch.full((rows, outputs + 3), 7.0, device=device)
    dense_product("linear_tiled", x.to(device), weight.to(device), y, None)
    assert_close(y[:, :outputs], expected, "fp32")
    narrow = torch.full_like(y, 7.0, dtype=torch.bfloat16)
    dense_product("linear_tiled", x.to(device), weight.to(device), narrow, None)
    assert torch.equal(narrow, y.bfloat16())
    dense_product("linear_tiled", x.to(device), weight.to(device), y, bias.to(device))
    assert_close(y[:, :outputs], expected + bias.double(), "fp32")
    assert y[:, outputs:].eq(7.0).all()
    from lmi_core.ops.kernels.cuda.linear import linear

    for row in range(0, rows, 11):  # whatever stands beside it
        own = x[row : row + 1].to(device)
        alone = linear(own, weight.to(device), bias.to(device), in_tiles=True)
        assert torch.equal(alone[0], y[row, :outputs])


def test_shapes_without_an_algorithm_run_in_tiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stand-in of cuBLASLt wants a workspace for so many inputs."""
    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    from lmi_core.ops.kernels.cuda import cublaslt
    from lmi_core.ops.kernels.cuda.linear import linear

    monkeypatch.setattr(cublaslt, "WORKSPACE_BYTES", 256)
    x, weight = random(12, 1096).bfloat16(), random(5, 1096, seed=1).bfloat16()
    in_tiles = torch.empty(12, 5)
    dense_product("linear_tiled", x, weight, in_tiles, None)
    for rows in (12, 11, 12):
        assert torch.equal(linear(x[:rows], weight, None), in_tiles[:rows])
    message = "products of 12 rows, 1096 inputs and 5 outputs run in a plain kernel, and so may"
    assert caplog.text.count(message) == 1
    assert "the heuristic of cuBLASLt returned status 15" in caplog.text
    assert "11 rows" not in caplog.text


def test_without_cublaslt_torch_multiplies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    from lmi_core.ops.kernels.cuda import cublaslt
    from lmi_core.ops.kernels.cuda.linear import linear

    reason = "libcublasLt.so.13: cannot open shared object file"
    monkeypatch.setattr(cublaslt, "unusable_because", lambda: reason)
    x, weight = random(12, 8).bfloat16(), random(5, 8).bfloat16()
    y = linear(x, weight, None)
    assert_close(y, x.double() @ weight.double().T, "fp32")
    assert f"linear runs in torch: the CUDA kernel has no cuBLASLt here ({reason})" in caplog.text


def test_what_is_no_cublaslt(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: what is open stays open."""
    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    script = f"""if True:
        import ctypes
        kernels = ctypes.CDLL({str(EMULATOR)!r})
        kernels.lmi_cuda_error.restype = ctypes.c_char_p
        for name in ("/nowhere.so", {str(EMULATOR)!r}):
            assert kernels.lmi_cuda_open_cublaslt(name.encode()) != 0
            print(kernels.lmi_cuda_error().decode())
    """
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    missing, other = result.stdout.splitlines()
    assert missing.startswith("cuBLASLt: /nowhere.so: cannot open shared object file")
    assert other == f"cuBLASLt: {EMULATOR} has no cublasLtMatmul"


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "is_gated"),
    [(1, 3080, 16, False), (5, 200, 40, False), (20, 1416, 70, True), (70, 256, 66, True)],
)
def test_linear_packed(
    ops: ModuleType,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    inputs: int,
    outputs: int,
    group_size: int,
    is_gated: bool,
) -> None:
    """The bytes that the CPU's kernels read give what its unpacking says."""
    weight, unpacked = packed_weight(outputs, inputs, group_size, is_gated)
    x, bias = random(rows, inputs).to(dtype), random(outputs, seed=2)
    expected = x.double() @ unpacked.T
    on_device = replace(weight, panels=weight.panels.to(device))
    sums = largest_sum(x, unpacked)
    y = ops.linear_packed(x.to(device), on_device, None)
    assert_close(y, expected, "fp32", sums=sums)
    y = ops.linear_packed(x.to(device), on_device, bias.to(device))
    assert_close(y, expected + bias.double(), "fp32", sums=sums)


@pytest.mark.parametrize("workspace_bytes", [0, 32 << 20])
@pytest.mark.parametrize(
    ("inputs", "is_gated", "group_size"), [(264, False, 64), (1416, True, 64), (1416, True, 128)]
)
def test_packed_rows_have_the_bits_that_they_have_alone(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    workspace_bytes: int,
    inputs: int,
    is_gated: bool,
    group_size: int,
) -> None:
    """In every tile of rows, by one kernel or by two that add up classes of inputs."""
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.kernels.cuda import cublaslt
    from lmi_core.ops.kernels.cuda.linear import linear_packed

    monkeypatch.setattr(cublaslt, "WORKSPACE_BYTES", workspace_bytes)
    monkeypatch.setattr(cublaslt, "_workspaces", {})
    weight, unpacked = packed_weight(298, inputs, group_size, is_gated)
    weight = replace(weight, panels=weight.panels.to(device))
    x, bias = random(70, inputs).bfloat16().to(device), random(298, seed=2).to(device)
    few = torch.cat([linear_packed(part, weight, bias) for part in x.split(16)])
    expected = x.double().cpu() @ unpacked.T + bias.double().cpu()
    assert_close(few, expected, "fp32", sums=largest_sum(x, unpacked))
    for rows in (17, 32, 33, 64, 70):
        assert torch.equal(linear_packed(x[:rows], weight, bias), few[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_that_the_cuda_kernel_does_not_cover(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.kernels.cuda.linear import linear_packed

    inputs = 64 if dtype == torch.float32 else 36
    weight, unpacked = packed_weight(20, inputs, 32, False)
    x = random(3, inputs).to(dtype)
    y = linear_packed(x.to(device), replace(weight, panels=weight.panels.to(device)), None)
    assert_close(y, x.double() @ unpacked.T, "fp32")
