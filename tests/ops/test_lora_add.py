"""The CUDA kernels of LoRA adapters, beside float64: on a GPU, or in the emulator of one."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device.adapter_table import AdapterTable  # noqa: E402
from lmi_core.ops.device.torch_weights import DeviceWeight  # noqa: E402
from lmi_core.ops.kernels.cuda import library  # noqa: E402
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import DEVICES, largest_sum, random  # noqa: E402

NUM_ROWS, NUM_OUTPUTS, MAX_RANK = 20, 200, 40
LINEAR_ID = 1


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    chosen = torch.device(request.param)
    use_cuda_kernels(chosen, monkeypatch)
    return chosen


def weight(rows: int, columns: int, seed: int, device: torch.device) -> DeviceWeight:
    matrix = random(rows, columns, seed=seed) / columns**0.5
    return DeviceWeight(matrix.to(torch.bfloat16).to(device))


def adapters(num_inputs: int, device: torch.device) -> AdapterTable:
    """Two that add to one of three linears: parts of other ranks side by side, and all outputs."""
    table = AdapterTable(MAX_RANK)

    def part(rank: int, first: int, outputs: int) -> tuple[DeviceWeight, DeviceWeight, int]:
        a = weight(rank, num_inputs, rank, device)
        return a, weight(outputs, rank, rank + 1, device), first

    table.set(3, [[], [part(8, 0, 37), part(40, 37, 100), part(16, 137, 63)], []])
    table.set(5, [[], [part(24, 0, NUM_OUTPUTS)], []])
    return table


def added(
    table: AdapterTable, x: torch.Tensor, y: torch.Tensor, runs: list[tuple[int, int, int]]
) -> torch.Tensor:
    """``runs``: first row, rows, slot."""
    described = {slot: table.described(slot) for _, _, slot in runs}
    most = library.load().interface.numbers["MAX_FEW_ROWS"]
    tiles = [(0, 0, 0)]  # no work
    for first, count, slot in runs:
        for row in range(first, first + count, most):
            tiles.append((described[slot].data_ptr(), row, min(most, first + count - row)))
    packed = np.array(tiles, np.dtype([("parts", "u8"), ("first_row", "i4"), ("num_rows", "i4")]))
    num_splits = -(-x.shape[1] // library.load().interface.numbers["LORA_SPLIT_INPUTS"])
    partials = torch.full((len(x), num_splits, 3, MAX_RANK), torch.nan, device=x.device)
    result = y.clone()
    library.call(
        "lora_add",
        x,
        x=x,
        y=result,
        partials=partials,
        tiles=torch.from_numpy(packed.view(np.uint8)).to(x.device),
        num_tiles=len(tiles),
        linear_id=LINEAR_ID,
        num_inputs=x.shape[1],
        num_outputs=NUM_OUTPUTS,
        max_rank=MAX_RANK,
        dtype=x.dtype,
    )
    return result


@pytest.mark.parametrize("num_inputs", [72, 4104])
def test_rows_of_two_adapters_and_of_none(device: torch.device, num_inputs: int) -> None:
    """In one part of the inputs, and in three."""
    table = adapters(num_inputs, device)
    x = random(NUM_ROWS, num_inputs, seed=3).to(torch.bfloat16).to(device)
    y = random(NUM_ROWS, NUM_OUTPUTS, seed=4).to(device)
    runs = [(0, 9, 3), (10, 1, 5), (11, 8, 3)]
    result = added(table, x, y, runs)
    expected, sums = y.double().cpu(), 0.0
    for first, count, slot in runs:
        rows = slice(first, first + count)
        for a, b, first_output in table._adapters[slot][LINEAR_ID]:
            z = (x[rows].double().cpu() @ a.matrix.double().cpu().T).bfloat16()
            own = b.matrix.cpu()
            outputs = slice(first_output, first_output + len(own))
            expected[rows, outputs] += z.double() @ own.double().T
            sums = max(sums, largest_sum(z, own))
    # A sum that is rounded to bf16 may fall on either side.
    np.testing.assert_allclose(result.double().cpu(), expected, atol=2e-2)
    assert (result.double().cpu() - expected).abs().mean() < 2e-4
    assert torch.equal(result[[9, 19]], y[[9, 19]]), "rows without an adapter"
    alone = added(table, x, y, [(4, 1, 3)])
    assert torch.equal(alone[4], result[4]), "a row's bits depend on its company"
