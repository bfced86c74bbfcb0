"""Matrix products in every implementation that this process can run, against float64; what runs
where is as in test_device_attention.py.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
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
    one_thread,
    ops,
    packed_weight,
    random,
)

__all__ = ["device", "one_thread", "ops"]  # fixtures


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(device: torch.device, dtype: str, has_bias: bool) -> None:
    from lmi_core.ops.torch_ops import linear

    x, weight, bias = random(5, 24), random(7, 24, seed=1), random(7, seed=2)
    x, weight = x.to(DTYPES[dtype]), weight.to(DTYPES[dtype])
    y = linear(x.to(device), weight.to(device), bias.to(device) if has_bias else None)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert_close(y, expected, "fp32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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
    from lmi_core.ops.cuda import linear

    x, weight, bias = random(rows, inputs), random(outputs, inputs, seed=1), random(outputs)
    x, weight = x.to(dtype), weight.to(dtype)
    expected = x.double() @ weight.double().T
    y = linear(x.to(device), weight.to(device), None)
    assert_close(y, expected, "fp32")
    y = linear(x.to(device), weight.to(device), bias.to(device))
    assert_close(y, expected + bias.double(), "fp32")
    for row in range(rows):  # whatever stands beside it
        alone = linear(x[row : row + 1].to(device), weight.to(device), bias.to(device))
        assert torch.equal(alone[0], y[row])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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
    from lmi_core.ops.cuda.cublaslt import linear_dense, unusable_because

    assert unusable_because() is None
    for seed in (1, 2):  # a shape's second product, of other operands
        x, weight = random(rows, inputs, seed=seed), random(outputs, inputs, seed=seed + 2)
        x, weight, bias = x.to(dtype), weight.to(dtype), random(outputs, seed=seed)
        expected = x.double() @ weight.double().T
        y = linear_dense(x.to(device), weight.to(device), None)
        np.testing.assert_allclose(y.cpu().double(), expected, atol=1e-4, rtol=1e-4)
        y = linear_dense(x.to(device), weight.to(device), bias.to(device))
        np.testing.assert_allclose(y.cpu().double(), expected + bias, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("offset", [1, 2, 8, 64])
def test_cublaslt_of_matrices_that_start_anywhere(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, offset: int
) -> None:
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.cuda.cublaslt import linear_dense, unusable_because

    assert unusable_because() is None
    for start in (0, offset):
        buffer = random(start + 12 * 64 + 24 * 64).bfloat16().to(device)[start:]
        x, weight = buffer[: 12 * 64].view(12, 64), buffer[12 * 64 :].view(24, 64)
        y = linear_dense(x, weight, None)
        expected = x.cpu().double() @ weight.cpu().double().T
        np.testing.assert_allclose(y.cpu().double(), expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(RuntimeError, match="bias must start on 16 bytes"):
        linear_dense(x, weight, torch.zeros(25, device=device)[1:])


def test_cublaslt_is_asked_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    from lmi_core.ops.cuda.cublaslt import linear_dense, unusable_because

    assert unusable_because() is None
    num_heuristics = ctypes.CDLL(str(CUBLASLT_EMULATOR)).cublaslt_num_heuristics
    x, weight, bias = random(12, 8).half(), random(5, 8).half(), random(5)
    before = num_heuristics()
    for _ in range(3):
        linear_dense(x, weight, None)
        linear_dense(x, weight, bias)
        linear_dense(x[:11], weight, None)
    assert num_heuristics() == before + 3


def test_without_cublaslt_torch_multiplies(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    from lmi_core.ops.cuda import cublaslt, linear

    reason = "libcublasLt.so.13: cannot open shared object file"
    monkeypatch.setattr(cublaslt, "unusable_because", lambda: reason)
    x, weight = random(12, 8).half(), random(5, 8).half()
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "is_gated"),
    [(1, 128, 16, False), (5, 200, 40, False), (20, 1416, 70, True), (70, 256, 66, True)],
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
    y = ops.linear_packed(x.to(device), on_device, None)
    assert_close(y, expected, "fp32")
    y = ops.linear_packed(x.to(device), on_device, bias.to(device))
    assert_close(y, expected + bias.double(), "fp32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_that_the_cuda_kernel_does_not_cover(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.cuda import linear_packed

    inputs = 64 if dtype == torch.float32 else 36
    weight, unpacked = packed_weight(20, inputs, 32, False)
    x = random(3, inputs).to(dtype)
    y = linear_packed(x.to(device), replace(weight, panels=weight.panels.to(device)), None)
    assert_close(y, x.double() @ unpacked.T, "fp32")
