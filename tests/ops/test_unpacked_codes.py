"""Many rows by int8 and fp8 weights whose codes are laid out for cuBLASLt: when, where and how.

``test_linear_quantized.py`` has what such products give.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core import _native, ops  # noqa: E402
from lmi_core.ops.device import packed_weight as limits  # noqa: E402
from lmi_core.ops.device.packed_weight import PackedWeight  # noqa: E402
from lmi_core.ops.device.recorded_steps import RecordedSteps  # noqa: E402
from lmi_core.ops.graph import Graph  # noqa: E402
from lmi_core.ops.kernels.cuda import cublaslt, library  # noqa: E402
from lmi_core.ops.kernels.cuda.linear_quantized import linear_quantized  # noqa: E402
from tests.ops.cuda_kernels import CUBLASLT_EMULATOR, use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import packed_weight, random  # noqa: E402
from tests.ops.test_linear_quantized import fp8_weight, with_outliers  # noqa: E402
from tests.ops.test_step_list import SIZES, embed, lowered, native_step, norm  # noqa: E402

CPU = torch.device("cpu")
MOST = 4
"""Rows of products in panels here."""


@pytest.fixture(autouse=True)
def _in_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda_kernels(CPU, monkeypatch)
    monkeypatch.setattr(limits, "MAX_PANEL_ROWS", {"int8": MOST, "fp8": MOST})


def weight_of(
    format: Literal["int8", "fp8"], outputs: int, inputs: int, is_gated: bool = False
) -> PackedWeight:
    if format == "int8":
        return packed_weight(outputs, inputs, 0, is_gated)[0]
    return fp8_weight(outputs, inputs, False, is_gated)[0]


def num_products() -> int:
    """That cuBLASLt's emulator made since ``cublaslt_set_costs``."""
    return int(ctypes.CDLL(str(CUBLASLT_EMULATOR)).cublaslt_num_products(0))


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_more_rows_than_the_threshold(format: Literal["int8", "fp8"], is_gated: bool) -> None:
    weight, bias = weight_of(format, 96, 200, is_gated), random(96, seed=2)
    x = with_outliers(random(MOST + 1, 200)).to(torch.bfloat16)
    x[1], x[2, 7] = 0, torch.inf
    before = num_products()
    few = linear_quantized(x[:MOST], weight, bias)
    assert num_products() == before
    many = linear_quantized(x, weight, bias)
    assert num_products() == before + 1
    assert many[2].isnan().all()
    if format == "int8":
        np.testing.assert_array_equal(many[:MOST], few)
    else:
        largest = few[[0, 3]].abs().max().item()
        np.testing.assert_allclose(many[:MOST], few, rtol=1e-4, atol=1e-4 * largest)


@pytest.mark.parametrize("is_gated", [False, True])
def test_slices_of_outputs(monkeypatch: pytest.MonkeyPatch, is_gated: bool) -> None:
    """Sums are exact: the same bits in three products as in one, and as in panels."""
    weight, x = weight_of("int8", 168, 72, is_gated), with_outliers(random(7, 72))
    whole = linear_quantized(x, weight, None)
    monkeypatch.setattr(limits, "MAX_UNPACKED_BYTES", 100 * 128)
    before = num_products()
    assert torch.equal(linear_quantized(x, weight, None), whole)
    assert num_products() == before + 3
    monkeypatch.setitem(limits.MAX_PANEL_ROWS, "int8", 7)
    assert torch.equal(linear_quantized(x, weight, None), whole)


def test_room_for_too_few_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_UNPACKED_BYTES", 63 * 128)
    with pytest.raises(RuntimeError, match="linear_quantized: no 64 outputs of 72 inputs fit"):
        linear_quantized(random(7, 72), weight_of("int8", 80, 72), None)


@pytest.mark.parametrize(("format", "outputs"), [("int8", 82), ("fp8", 88)])
def test_outputs_that_cublaslt_has_no_algorithm_for(
    format: Literal["int8", "fp8"], outputs: int, caplog: pytest.LogCaptureFixture
) -> None:
    """They stay in panels, and the log says so once."""
    weight, x = weight_of(format, outputs, 72), random(7, 72)
    before = num_products()
    results = [linear_quantized(x, weight, None) for _ in range(2)]
    assert num_products() == before
    assert caplog.text.count(f"128 inputs and {outputs} outputs run in a plain kernel") == 1
    assert torch.equal(*results)


def test_what_stays_in_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales of groups, and everything where there is no cuBLASLt."""
    x, before = random(7, 256), num_products()
    grouped = fp8_weight(96, 256, True, False)[0]
    assert grouped.unpacked_bytes == 0
    linear_quantized(x, grouped, None)
    monkeypatch.setattr(cublaslt, "can_unpack", lambda: False)
    linear_quantized(x, weight_of("int8", 96, 256), None)
    assert num_products() == before


def steps_of(outputs: int) -> RecordedSteps:
    graph = Graph("bf16")
    x = embed(graph)
    y = ops.linear(norm(x), packed_weight(outputs, x.columns, 0, False)[0])
    ops.sample(ops.linear(norm(ops.gather_logit_rows(y)), packed_weight(40, outputs, 0, False)[0]))
    return lowered(graph).build(SIZES)


def test_a_step_list_lays_them_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most rows of a step, with room in the arena and an algorithm asked for before."""

    def logprobs(most: int) -> tuple[int, list[object], int]:
        monkeypatch.setitem(limits.MAX_PANEL_ROWS, "int8", most)
        steps = steps_of(64)
        num_heuristics = ctypes.CDLL(str(CUBLASLT_EMULATOR)).cublaslt_num_heuristics
        worker = _native.DeviceWorker(str(steps.list.library.path), steps.list.address)
        step, before, asked = native_step(), num_products(), num_heuristics()
        step.add([3, 9, 4, 1, 7, 2, 6, 5], 0, 0, 0, "last")
        worker.run(step)
        assert num_heuristics() == asked
        result = (num_products() - before, step.logprobs(), steps._arena.numel())
        worker.close()
        steps.close()
        return result

    (in_panels, expected, num_bytes), (laid_out, found, more_bytes) = logprobs(8), logprobs(4)
    assert (in_panels, laid_out) == (0, 1)
    assert found == expected
    assert more_bytes > num_bytes
    library.load().log_notices()
