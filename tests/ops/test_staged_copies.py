"""Weights on their way to a GPU: in parts through a few rooms, on the CPU as there."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device import staged_copies  # noqa: E402
from lmi_core.ops.device.torch_weights import DeviceWeight, DeviceWeights  # noqa: E402
from tests.ops.device_ops import DEVICES  # noqa: E402


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    monkeypatch.setattr(staged_copies, "ROOM_BYTES", 1000)
    return torch.device(request.param)


@pytest.mark.parametrize("num_values", [0, 1, 500, 501, 12_345])
def test_all_parts_arrive(device: torch.device, num_values: int) -> None:
    values = np.random.default_rng(0).integers(0, 2**16, num_values).astype(np.uint16)
    values.flags.writeable = False  # as mapped files are
    target = torch.zeros(num_values, dtype=torch.bfloat16, device=device)
    staged_copies.StagedCopies(device).copy(values, target)
    assert np.array_equal(target.cpu().view(torch.uint16).numpy(), values)


def test_other_sizes_are_refused(device: torch.device) -> None:
    copies = staged_copies.StagedCopies(device)
    with pytest.raises(ValueError, match="12 bytes for a tensor of 8"):
        copies.copy(np.zeros(3, np.float32), torch.zeros(2, device=device))


def test_weights_take_that_way_where_they_are_large(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are what they are without it: as stored, converted, quantised."""
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal((rows, 128)).astype(np.float32) for rows in (16, 32)]
    stored = [part.view(np.uint16)[:, 1::2] for part in parts]
    plain = DeviceWeights(device)
    staged = DeviceWeights(device)
    monkeypatch.setattr(staged, "_is_staged", lambda values: True)
    for given, format in ((stored, "bf16"), (parts, "bf16"), (parts, "fp32")):
        results = [each.pack(given, format=format, gated=False) for each in (plain, staged)]
        assert all(isinstance(result, DeviceWeight) for result in results)
        assert torch.equal(results[0].matrix, results[1].matrix)
    for format in ("int8", "int4", "fp8"):
        results = [each.pack(parts, format=format, gated=False) for each in (plain, staged)]
        assert torch.equal(results[0].panels, results[1].panels)
    assert staged._staged is not None
    assert plain._staged is None
