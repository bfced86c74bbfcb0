"""Many rows by int4 weights that are unpacked first, in CUDA and in Triton kernels: on a GPU, or in
the emulator of one and Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

import lmi_core.ops as graph_ops  # noqa: E402
from lmi_core.ops.device import packed_weight as limits  # noqa: E402
from lmi_core.ops.device.eager import EagerGraph  # noqa: E402
from lmi_core.ops.device.packed_weight import PackedWeight  # noqa: E402
from lmi_core.ops.kernels import select  # noqa: E402
from lmi_core.ops.kernels.cuda import cublaslt  # noqa: E402
from lmi_core.ops.kernels.cuda.linear import linear_packed  # noqa: E402
from lmi_core.ops.kernels.torch_ops.linear import linear as torch_linear  # noqa: E402
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import (  # noqa: E402
    DEVICES,
    packed_weight,
    random,
    triton_module,
)

DTYPES_16 = [torch.bfloat16, torch.float16]
SHAPES = [(40, 200, False), (66, 256, True), (70, 1416, True), (33, 8, False)]
"""Outputs, inputs, whether gated."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where more than 20 rows are many."""
    monkeypatch.setattr(limits, "MAX_PACKED_ROWS", 20)
    return torch.device(request.param)


@pytest.fixture
def cuda_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    use_cuda_kernels(device, monkeypatch)
    return device


class Side(NamedTuple):
    """An implementation, and its dense product."""

    linear_packed: Callable[..., torch.Tensor]
    linear: Callable[..., torch.Tensor]


@pytest.fixture(params=["triton", "native"])
def side(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> Side:
    if request.param == "native":
        if request.node.callspec.params.get("dtype") == torch.float16:
            pytest.skip("models are of bf16; the interpreter alone is tried with fp16")
        use_cuda_kernels(device, monkeypatch)
        return Side(linear_packed, cublaslt.linear_dense)
    ops = triton_module(device)
    if device.type == "cpu" and request.node.callspec.params.get("dtype") == torch.bfloat16:
        pytest.skip("the interpreter rounds bf16 towards zero")
    return Side(ops.linear_packed, torch_linear)


def weight_on(
    device: torch.device, outputs: int, inputs: int, group_size: int, is_gated: bool
) -> PackedWeight:
    weight, _ = packed_weight(outputs, inputs, group_size, is_gated)
    return replace(weight, panels=weight.panels.to(device))


def room_for(weight: PackedWeight) -> torch.Tensor:
    """Filled with what is no weight."""
    return torch.full(
        (weight.unpacked_bytes,), 0xFF, dtype=torch.uint8, device=weight.panels.device
    )


@pytest.mark.parametrize("dtype", DTYPES_16)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize(("outputs", "inputs", "is_gated"), SHAPES)
def test_weights_are_unpacked_and_rounded_once(
    side: Side,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    outputs: int,
    inputs: int,
    is_gated: bool,
    group_size: int,
) -> None:
    """Rows of the identity read them back; what fp32 says of them is exact."""
    monkeypatch.setattr(limits, "MAX_PACKED_ROWS", 0)
    weight = weight_on(device, outputs, inputs, group_size, is_gated)
    x = torch.eye(inputs, dtype=dtype, device=device)[:200]
    y = side.linear_packed(x, weight, None, unpacked=room_for(weight))
    assert torch.equal(y.T, weight.unpack().to(dtype).float()[:, :200])


@pytest.mark.parametrize("dtype", DTYPES_16)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs", "is_gated"), SHAPES)
def test_both_sides_of_the_threshold(
    side: Side,
    device: torch.device,
    dtype: torch.dtype,
    outputs: int,
    inputs: int,
    is_gated: bool,
    has_bias: bool,
) -> None:
    weight = weight_on(device, outputs, inputs, 32, is_gated)
    bias = random(outputs, seed=2).to(device) if has_bias else None
    x = random(21, inputs).to(device, dtype)
    room = room_for(weight)
    few = side.linear_packed(x[:20], weight, bias, unpacked=room)
    assert torch.equal(few, side.linear_packed(x[:20], weight, bias))
    many = side.linear_packed(x, weight, bias, unpacked=room)
    dense = side.linear(x, weight.unpack().to(dtype), bias)
    assert torch.equal(many, dense)
    expected = x.double() @ weight.unpack().to(dtype).double().T
    if bias is not None:
        expected += bias.double()
    np.testing.assert_allclose(many.cpu(), expected.cpu(), atol=1e-3, rtol=1e-4)
    assert not torch.equal(many[:20], few)


@pytest.mark.parametrize(
    ("outputs", "is_gated"), [(200, False), (128, True), (140, True), (2 * 129, True)]
)
@pytest.mark.parametrize("num_fitting", [64, 100, 128])
def test_slices_of_outputs(
    side: Side,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    outputs: int,
    is_gated: bool,
    num_fitting: int,
) -> None:
    """Gate and up in one slice, and on both sides of a seam."""
    inputs = 72
    weight = weight_on(device, outputs, inputs, 32, is_gated)
    x, bias = random(21, inputs).to(device, torch.bfloat16), random(outputs, seed=2).to(device)
    whole = side.linear_packed(x, weight, bias, unpacked=room_for(weight))
    monkeypatch.setattr(limits, "MAX_UNPACKED_BYTES", num_fitting * 2 * inputs)
    assert weight.unpacked_bytes == num_fitting * 2 * inputs
    sliced = side.linear_packed(x, weight, bias, unpacked=room_for(weight))
    np.testing.assert_allclose(sliced.cpu(), whole.cpu(), atol=1e-4, rtol=1e-4)


def test_room_for_too_few_outputs(
    cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = weight_on(cuda_device, 80, 32, 32, False)
    monkeypatch.setattr(limits, "MAX_UNPACKED_BYTES", 63 * 2 * 32)
    x = random(21, 32).to(cuda_device, torch.bfloat16)
    with pytest.raises(RuntimeError, match="no 64 outputs of 32 inputs fit into 4032 bytes"):
        linear_packed(x, weight, None, unpacked=room_for(weight))


def test_without_cublaslt_many_rows_stay_packed(
    cuda_device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cublaslt, "unusable_because", lambda: f"nothing here for {cuda_device}")
    weight = weight_on(cuda_device, 40, 64, 32, False)
    x = random(21, 64).to(cuda_device, torch.bfloat16)
    for _ in range(2):
        y = linear_packed(x, weight, None, unpacked=room_for(weight))
        assert torch.equal(y, linear_packed(x, weight, None))
    assert caplog.text.count(f"no cuBLASLt (nothing here for {cuda_device})") == 1


@pytest.mark.parametrize(("forced", "has_room"), [("native", True), ("torch", False)])
def test_one_room_for_all_weights(cuda_device: torch.device, forced: str, has_room: bool) -> None:
    """Allocated before a step is measured."""
    kernels = select.load(select.launched_from_python(select.select(cuda_device.type, forced)))
    graph = graph_ops.Graph("bf16")
    x = graph_ops.embed(graph, np.zeros((4, 64), np.float32))
    for outputs in (64, 96, 64):
        h = graph_ops.rms_norm(x, np.ones(64, np.float32), 1e-5)
        weight = weight_on(cuda_device, outputs, 64, 32, False)
        graph_ops.linear(h, weight)
    room = EagerGraph(graph, kernels, cuda_device)._unpacked
    assert (room is not None and room.numel() == 2 * 96 * 64) == has_room
