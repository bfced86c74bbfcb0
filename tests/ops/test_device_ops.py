"""Every implementation of an op that this process can run, against float64.

Triton kernels run on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1 is set for a process
of its own: ``make test-triton``. CUDA kernels run on a GPU, or in the emulator of
tests/cuda_emulator.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.packed_weight import PackedWeight  # noqa: E402
from tests.ops.cuda_kernels import (  # noqa: E402
    CUBLASLT_EMULATOR,
    EMULATOR,
    use_cuda_kernels,
)
from tests.ops.paged_case import PagedCase  # noqa: E402

DEVICES = [
    pytest.param("cpu", id="cpu"),
    pytest.param(
        "cuda",
        id="cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
        ],
    ),
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": {"atol": 3e-5, "rtol": 3e-5}, "bf16": {"atol": 2e-2, "rtol": 2e-2}}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=["torch", "triton", "native"])
def ops(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    if request.param == "torch":
        return importlib.import_module("lmi_core.ops.torch_ops")
    if request.param == "native":
        use_cuda_kernels(device, monkeypatch)
        return importlib.import_module("lmi_core.ops.cuda")
    return _triton_ops(device)


@pytest.fixture(params=["triton"])
def triton_ops(device: torch.device) -> ModuleType:
    return _triton_ops(device)


def _triton_ops(device: torch.device) -> ModuleType:
    pytest.importorskip("triton")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter wants a process of its own: make test-triton")
    return importlib.import_module("lmi_core.ops.triton")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: torch.Tensor, expected: object, dtype: str) -> None:
    assert actual.dtype == DTYPES[dtype]
    np.testing.assert_allclose(
        actual.double().cpu().numpy(), np.asarray(expected), **TOLERANCES[dtype]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (3, 7), (2, 64), (5, 129), (0, 16), (1, 5000)]
)
@pytest.mark.parametrize("is_added", [False, True])
def test_rms_norm(
    ops: ModuleType, device: torch.device, dtype: str, rows: int, columns: int, is_added: bool
) -> None:
    x, addend, weight = random(rows, columns), random(rows, columns, seed=1), random(columns)
    wide = x.double() + (addend.double() if is_added else 0)
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    value = x.to(device)
    y = ops.rms_norm(
        value,
        weight.to(device),
        1e-5,
        out_dtype=DTYPES[dtype],
        addend=addend.to(device) if is_added else None,
    )
    assert_close(y, expected, dtype)
    assert_close(value, wide, "fp32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 33), (4, 96), (2, 1030)])
def test_gated_activation(
    ops: ModuleType, device: torch.device, dtype: str, activation: str, rows: int, columns: int
) -> None:
    gate_up = random(rows, 2 * columns) * 4
    gate_up[0, 0] = -40.0  # where a naive exp overflows
    gate, up = gate_up.double().chunk(2, -1)
    if activation == "silu":
        gate = gate / (1 + torch.exp(-gate))
    else:
        inner = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
        gate = 0.5 * gate * (1 + torch.tanh(inner))
    y = ops.gated_activation(gate_up.to(device), activation, out_dtype=DTYPES[dtype])
    assert_close(y, gate * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "rotary"),
    [(1, 1, 16, 16), (4, 2, 32, 32), (6, 2, 48, 24), (3, 1, 80, 80), (2, 2, 8, 2)],
)
def test_rope_cache_write(
    ops: ModuleType,
    device: torch.device,
    dtype: str,
    is_normed: bool,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary: int,
) -> None:
    case = PagedCase(((0, 2), (17, 1), (15, 3)), num_q_heads, num_kv_heads, head_dim)
    step = case.step(device)
    keys, values = case.cache(device, DTYPES[dtype], is_filled=False)
    num_heads = num_q_heads + 2 * num_kv_heads
    qkv = random(case.num_tokens, num_heads * head_dim)
    angles = random(case.max_length, rotary // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    q_norm, k_norm = random(head_dim, seed=2), random(head_dim, seed=3)
    q = ops.rope_cache_write(
        qkv.to(device),
        keys,
        values,
        step.positions,
        step.slots,
        cos.to(device),
        sin.to(device),
        num_q_heads=num_q_heads,
        q_norm=q_norm.to(device) if is_normed else None,
        k_norm=k_norm.to(device) if is_normed else None,
        norm_eps=1e-6,
        out_dtype=DTYPES[dtype],
    )

    heads = qkv.double().view(-1, num_heads, head_dim)
    positions = torch.from_numpy(step.host.positions).long()
    wide_cos, wide_sin = (table.double()[positions].unsqueeze(1) for table in (cos, sin))

    def rotated(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        if is_normed:
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
        a, b, rest = x.split([rotary // 2, rotary // 2, head_dim - rotary], dim=-1)
        return torch.cat([a * wide_cos - b * wide_sin, b * wide_cos + a * wide_sin, rest], -1)

    expected_q = rotated(heads[:, :num_q_heads], q_norm).flatten(1)
    expected_k = rotated(heads[:, num_q_heads : num_q_heads + num_kv_heads], k_norm)
    assert_close(q, expected_q, dtype)
    slots = torch.from_numpy(step.host.slots).long()
    assert_close(keys.cpu()[slots], expected_k, dtype)
    assert_close(values.cpu()[slots], heads[:, num_q_heads + num_kv_heads :], dtype)
    untouched = torch.ones(len(keys), dtype=torch.bool)
    untouched[slots] = False
    assert keys.cpu()[untouched].isnan().all()
    assert values.cpu()[untouched].isnan().all()


ATTENTION_CASES = {
    "one token": PagedCase(((0, 1),), 1, 1, 16),
    "decode": PagedCase(((0, 1), (15, 1), (16, 1), (70, 1)), 4, 2, 32),
    "decode, one block over": PagedCase(((31, 1), (32, 1), (33, 1)), 8, 1, 16, block_size=32),
    "prefill": PagedCase(((0, 37),), 4, 4, 16),
    "chunks": PagedCase(((19, 18), (0, 2), (33, 16)), 6, 2, 24),
    "mixed": PagedCase(((40, 1), (0, 17), (3, 1), (16, 33)), 3, 1, 80),
}


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


@pytest.mark.parametrize("window", [0, 50])
def test_attention_over_several_splits(
    triton_ops: ModuleType, device: torch.device, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long and short sequences side by side: the short ones' last splits are empty."""
    module = importlib.import_module("lmi_core.ops.triton.attention")
    monkeypatch.setattr(module, "MIN_SPLIT_KEYS", 32)
    case = PagedCase(((99, 1), (0, 1), (40, 1)), 2, 1, 16)
    keys, values = case.cache(device, torch.float32, is_filled=True)
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device)
    settings = {"scale": 0.25, "window": window, "soft_cap": 0.0}
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
def test_plan_splits(
    triton_ops: ModuleType, num_keys: int, num_programs: int, expected: tuple[int, int]
) -> None:
    module = importlib.import_module("lmi_core.ops.triton.attention")
    assert module.plan_splits(num_keys, num_programs) == expected


NATIVE_CASES = {
    "splits": PagedCase(((699, 1), (0, 1), (299, 1)), 4, 1, 64),
    "wide heads": PagedCase(((300, 1), (5, 40)), 4, 2, 256),
    "odd heads": PagedCase(((70, 1), (13, 70)), 7, 1, 80),
    "large group": PagedCase(((290, 1), (30, 3)), 20, 1, 128, block_size=32),
    "no groups": PagedCase(((64, 130), (63, 1)), 2, 2, 128),
}


@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (90, 5.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NATIVE_CASES)
def test_native_attention(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    window: int,
    soft_cap: float,
    name: str,
) -> None:
    """Shapes that the kernels take in different ways."""
    use_cuda_kernels(device, monkeypatch)
    ops = importlib.import_module("lmi_core.ops.cuda")
    case = NATIVE_CASES[name]
    keys, values = case.cache(device, dtype, is_filled=True)
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device, dtype)
    settings = {"scale": case.head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    y = ops.attention(q, keys, values, case.step(device), num_q_heads=case.num_q_heads, **settings)
    assert y.dtype == dtype
    expected = case.expected_attention(q, keys, values, **settings)
    np.testing.assert_allclose(y.double().cpu().numpy(), expected, **TOLERANCES["bf16"])


def test_native_attention_leaves_what_it_has_not(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_cuda_kernels(device, monkeypatch)
    ops = importlib.import_module("lmi_core.ops.cuda")
    case = PagedCase(((3, 1),), 2, 1, 20)
    keys, values = case.cache(device, torch.bfloat16, is_filled=True)
    q = random(1, 40).to(device, torch.bfloat16)
    settings = {"scale": 0.2, "window": 0, "soft_cap": 0.0}
    y = ops.attention(q, keys, values, case.step(device), num_q_heads=2, **settings)
    assert_close(y, case.expected_attention(q, keys, values, **settings), "bf16")
    assert "the CUDA kernel has no heads of 20" in caplog.text


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


def packed_weight(
    outputs: int, inputs: int, group_size: int, is_gated: bool
) -> tuple[PackedWeight, torch.Tensor]:
    """A random one, and its values in float64."""
    from lmi_core import _native

    matrix = random(outputs, inputs, seed=1).numpy()
    packed = _native.LinearWeight.pack(
        np.split(matrix, 2) if is_gated else [matrix],
        format="int4" if group_size else "int8",
        gated=is_gated,
        group_size=group_size,
    )
    weight = PackedWeight(
        panels=torch.frombuffer(bytearray(packed.packed()), dtype=torch.uint8),
        format="int4" if group_size else "int8",
        num_outputs=outputs,
        num_inputs=inputs,
        group_size=group_size,
        is_gated=is_gated,
    )
    return weight, torch.from_numpy(packed.unpack()).double()


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


def test_gather_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.cuda.rows import gather_rows

    ids = torch.tensor([3, 0, 3], dtype=torch.int32)
    for columns in (5, 64):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            table = random(4, columns).to(dtype)
            y = gather_rows(table.to(device), ids.to(device), 0.5)
            assert torch.equal(y.cpu(), table.float()[ids.long()] * 0.5)


def test_copy_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.cuda.rows import copy_blocks

    store = random(3, 5 * 16, 2, 8).to(torch.bfloat16)
    expected = store.clone()
    for source, target in ((4, 0), (2, 3)):
        expected[:, 16 * target : 16 * target + 16] = store[:, 16 * source : 16 * source + 16]
    src, dst = torch.tensor([[4, 2], [0, 3]], dtype=torch.int32).to(device)
    moved = store.to(device)
    copy_blocks(moved, src, dst, block_size=16)
    assert torch.equal(moved.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(device: torch.device, dtype: str, has_bias: bool) -> None:
    from lmi_core.ops.torch_ops import linear

    x, weight, bias = random(5, 24), random(7, 24, seed=1), random(7, seed=2)
    x, weight = x.to(DTYPES[dtype]), weight.to(DTYPES[dtype])
    y = linear(x.to(device), weight.to(device), bias.to(device) if has_bias else None)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert_close(y, expected, "fp32")
