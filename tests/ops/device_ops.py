"""What tests of ops on torch devices share: devices, implementations, tolerances, operands."""

from __future__ import annotations

import os
from types import ModuleType

import numpy as np
import pytest
import torch

from lmi_core.ops.device.packed_weight import PackedWeight
from lmi_core.ops.kernels import select
from tests.ops.cuda_kernels import use_cuda_kernels

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
TRUNCATION = 2.0**-21
"""Of the sum of products' magnitudes: tensor cores cut off what doesn't fit where they align
products, and round no partial sum, so that errors of a few hundred inputs have one sign."""
FP8_TRUNCATION = 2e-3
"""Of a result, where products of fp8 are summed by tensor cores' own instructions, which keep some
14 bits."""
TOLERANCES = {"fp32": {"atol": 3e-5, "rtol": 3e-5}, "bf16": {"atol": 2e-2, "rtol": 2e-2}}


class Implementation(ModuleType):
    """The ops of the package of one implementation, as steps get them."""

    def __init__(self, name: str, package: str) -> None:
        super().__init__(f"lmi_core.ops.kernels.{package}")
        self._name = name

    def __getattr__(self, op: str) -> object:
        return select.function(op, self._name)


TORCH = Implementation("torch", "torch_ops")
TRITON = Implementation("triton", "triton")
NATIVE = Implementation("native", "cuda")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(params=["torch", "triton", "native"])
def ops(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    if request.param == "torch":
        return TORCH
    if request.param == "native":
        use_cuda_kernels(device, monkeypatch)
        return NATIVE
    return triton_module(device)


@pytest.fixture(params=["triton"])
def triton_ops(device: torch.device) -> ModuleType:
    return triton_module(device)


def triton_module(device: torch.device) -> ModuleType:
    """Triton's kernels, or skips the test where they can't run."""
    pytest.importorskip("triton")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton's interpreter wants a process of its own: make test-triton")
    return TRITON


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_close(actual: torch.Tensor, expected: object, dtype: str, *, sums: float = 0.0) -> None:
    """``sums``: ``largest_sum`` of a matrix product."""
    assert actual.dtype == DTYPES[dtype]
    tolerance = dict(TOLERANCES[dtype])
    if actual.is_cuda:
        tolerance["atol"] += TRUNCATION * sums
    np.testing.assert_allclose(actual.double().cpu().numpy(), np.asarray(expected), **tolerance)


def largest_sum(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Of the magnitudes of a result's products, where a result is a row times a row of weights."""
    return (x.cpu().double().abs() @ weight.cpu().double().abs().T).max().item()


def fp8_tolerance(device: torch.device, ops: ModuleType) -> float:
    """Relative. On Hopper ours are multiplied as fp16, and Triton's so by Hopper's own instructions
    for 64 rows and more."""
    if device.type != "cuda" or "torch_ops" in ops.__name__:
        return 1e-5
    has_own = torch.cuda.get_device_capability(device) != (9, 0)
    return FP8_TRUNCATION if "triton" in ops.__name__ or has_own else 1e-5


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
