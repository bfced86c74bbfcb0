"""Routing and experts' products on torch devices, in every implementation that this process can
run, against float64, and to the bit in any company."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device.expert_rows import ExpertTable  # noqa: E402
from lmi_core.ops.device.torch_weights import DeviceWeights  # noqa: E402
from lmi_core.ops.kernels import select  # noqa: E402
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import (  # noqa: E402
    NATIVE,
    TORCH,
    Implementation,
    device,
    ops,
    random,
    triton_module,
)
from tests.ops.test_experts import ROUTINGS, TOP_K  # noqa: E402
from tests.ops.torch_formulas import routes as exact_routes  # noqa: E402

__all__ = ["device", "ops"]  # fixtures
NUM_EXPERTS, NUM_INPUTS, NUM_OUTPUTS = 24, 72, 40
UNBIASED = {"normalizes": False, "scale": 1.0, "threshold": 0.0, "top_k": TOP_K, "bias": None}
UNBIASED |= {"num_groups": 1, "top_groups": 1, "group_best": 1}


def known(settings: dict[str, Any], bias: torch.Tensor) -> dict[str, Any]:
    return {**UNBIASED, **settings, "bias": bias if settings.get("bias") else None}


@pytest.mark.parametrize("num_experts", [24, 60])
@pytest.mark.parametrize("settings", ROUTINGS)
def test_routes(
    ops: ModuleType, device: torch.device, settings: dict[str, Any], num_experts: int
) -> None:
    logits, bias = random(30, num_experts), random(num_experts, seed=1) / 4
    found = ops.route(logits.to(device), **known(settings, bias.to(device))).cpu()
    exact = exact_routes(logits.double(), **known(settings, bias.double()))
    np.testing.assert_array_equal(found[:, :TOP_K], exact[:, :TOP_K])
    np.testing.assert_allclose(found[:, TOP_K:], exact[:, TOP_K:], rtol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")  # numpy interprets
@pytest.mark.parametrize("settings", ROUTINGS)
def test_ties_and_what_is_not_finite(
    ops: ModuleType, device: torch.device, settings: dict[str, Any]
) -> None:
    logits = torch.zeros(4, NUM_EXPERTS)
    logits[1, 20] = 1.0
    logits[2] = torch.nan
    logits[3] = -torch.inf
    settings = known({**settings, "bias": False}, logits)
    ids = ops.route(logits.to(device), **settings).cpu()[:, :TOP_K]
    np.testing.assert_array_equal(ids[:2], [[0, 1, 2, 3], [0, 1, 2, 20]])
    assert ((ids >= 0) & (ids < NUM_EXPERTS)).all()
    assert (ids.diff() > 0).all()


class Experts:
    """Random ones, and rows of which most choose the same."""

    def __init__(
        self,
        device: torch.device,
        format: str,
        is_gated: bool,
        *,
        num_experts: int = NUM_EXPERTS,
        act: str = "",
    ) -> None:
        parts = 2 if is_gated else 1
        shape = (NUM_OUTPUTS // parts, NUM_INPUTS)
        matrices = [
            [random(*shape, seed=10 * expert + part).numpy() for part in range(parts)]
            for expert in range(num_experts)
        ]
        packed = DeviceWeights(device).pack_experts(matrices, format=format, gated=is_gated)  # type: ignore[arg-type]
        kernels = select.load(select.select("cpu", "torch"))
        self.act = torch.bfloat16 if "bf16" in (format, act) else torch.float32

        def multiply(expert: int, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            weight: Any = packed.experts[expert]
            if format in ("fp32", "bf16"):
                return kernels.linear(rows, weight.matrix, bias)
            product = kernels.linear_quantized if weight.row_format else kernels.linear_packed
            return product(rows, weight, bias)

        self.table = ExpertTable(packed.experts, multiply)
        self.matrices = [
            (weight.matrix if format in ("fp32", "bf16") else weight.unpack()).double().cpu()  # type: ignore[attr-defined]
            for weight in packed.experts
        ]
        self.bias = random(num_experts, NUM_OUTPUTS, seed=3)
        logits = random(90, num_experts, seed=4)
        logits[:70] = logits[0]
        settings: dict[str, Any] = {**UNBIASED, "scoring": "softmax"}
        self.routes = TORCH.route(logits, **settings)
        self.x = random(90, NUM_INPUTS, seed=5).to(self.act)

    def exact(self) -> torch.Tensor:
        """Sums over each row's experts."""
        y = torch.zeros(len(self.x), NUM_OUTPUTS, dtype=torch.float64)
        for row, (x, routes) in enumerate(zip(self.x.double(), self.routes, strict=True)):
            for expert, weight in zip(routes[:TOP_K].int(), routes[TOP_K:].double(), strict=True):
                y[row] += weight * (self.matrices[expert] @ x + self.bias[expert])
        return y

    def run(self, ops: ModuleType, rows: slice, device: torch.device) -> torch.Tensor:
        routes, x = self.routes[rows].to(device), self.x[rows].to(device)
        grouped = ops.group_rows(routes, len(self.matrices))
        sums = torch.ones(len(x), NUM_OUTPUTS, device=device)
        bias = self.bias.to(device)
        given = (routes, grouped, self.table, bias)
        assert ops.grouped_linear(x, *given, is_by_token=True, sums=sums) is None
        each = ops.grouped_linear(x, *given, is_by_token=True)
        again = ops.grouped_linear(x[grouped.token_rows], *given, is_by_token=False)
        assert torch.equal(each, again)
        return sums.cpu() - 1


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    ("format", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-4), ("int8", 0.15), ("int4", 1e-3)]
)
def test_products_and_sums(
    ops: ModuleType, device: torch.device, format: str, tolerance: float, is_gated: bool
) -> None:
    """More rows of an expert than a tile has, experts without rows, and few rows."""
    act = "bf16" if ops is NATIVE and format != "fp32" else ""
    experts = Experts(device, format, is_gated, act=act)
    exact = experts.exact()
    for rows in (slice(0, 90), slice(68, 72)):
        y = experts.run(ops, rows, device)
        np.testing.assert_allclose(y, exact[rows], atol=tolerance * 5, rtol=1e-3)


@pytest.mark.parametrize(
    ("format", "tolerance"), [("bf16", 1e-4), ("int8", 0.15), ("fp8", 0.3), ("int4", 1e-3)]
)
def test_many_rows_of_every_expert(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, format: str, tolerance: float
) -> None:
    """In the largest tiles; single rows are the same to the bit where their sums are exact or in an
    order of their own."""
    use_cuda_kernels(device, monkeypatch)
    experts = Experts(device, format, True, num_experts=TOP_K, act="bf16")
    every = experts.run(NATIVE, slice(0, 90), device)
    np.testing.assert_allclose(every, experts.exact(), atol=tolerance * 5, rtol=1e-3)
    if format in ("int8", "int4"):
        for rows in (slice(7, 8), slice(60, 65), slice(70, 90)):
            assert torch.equal(experts.run(NATIVE, rows, device), every[rows])


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_same_bits_in_any_company(device: torch.device, format: str) -> None:
    triton_module(device)
    ops = Implementation("invariant", "triton")
    ops.__dict__["group_rows"] = select.function("group_rows", "triton")
    experts = Experts(device, format, True)
    every = experts.run(ops, slice(0, 90), device)
    for rows in (slice(0, 1), slice(68, 73), slice(80, 90)):
        assert torch.equal(experts.run(ops, rows, device), every[rows])


def test_experts_in_bf16_have_the_same_bits_in_tiles(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cuda_kernels(device, monkeypatch)
    ops = Implementation("native", "native tiles")
    ops.__dict__["grouped_linear"] = partial(NATIVE.grouped_linear, in_tiles=True)
    experts = Experts(device, "bf16", True)
    every = experts.run(ops, slice(0, 90), device)
    np.testing.assert_allclose(every, experts.exact(), atol=5e-4, rtol=1e-3)
    for rows in (slice(0, 1), slice(68, 73), slice(80, 90)):
        assert torch.equal(experts.run(ops, rows, device), every[rows])


def test_rows_by_expert(ops: ModuleType, device: torch.device) -> None:
    routes = torch.tensor([[1, 3, 0.5, 0.5], [0, 3, 0.5, 0.5], [1, 3, 0.5, 0.5]])
    rows = ops.group_rows(routes.to(device), 5)
    assert rows.token_rows.tolist() == [1, 0, 2, 0, 1, 2]
    assert rows.places.tolist() == [[1, 3], [0, 4], [2, 5]]
    assert rows.first_rows.tolist() == [0, 1, 3, 3, 6, 6]
