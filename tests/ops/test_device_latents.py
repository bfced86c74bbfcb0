"""What latent attention is made of, on torch devices, against float64: products of each head's own
matrix, and attention of wide heads whose keys are the values."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device.expert_rows import ExpertTable  # noqa: E402
from lmi_core.ops.device.paged_cache import CacheScales, FixedScales, Scales  # noqa: E402
from lmi_core.ops.device.torch_weights import DeviceWeight  # noqa: E402
from lmi_core.ops.kernels.cuda import attention_lists, library  # noqa: E402
from tests.ops.coded_cache import CODES, coded_cache  # noqa: E402
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import (  # noqa: E402
    DTYPES,
    NATIVE,
    assert_close,
    device,
    largest_sum,
    ops,
    random,
)
from tests.ops.paged_case import PagedCase  # noqa: E402

__all__ = ["device", "ops"]  # fixtures
CASES = {
    "several heads' tiles": PagedCase(((70, 1), (0, 1), (37, 3)), 68, 1, 576),
    "several tokens a tile": PagedCase(((33, 1), (5, 40)), 16, 1, 288, block_size=32),
    "splits": PagedCase(((699, 1), (0, 1), (299, 1)), 4, 1, 264),
}
PLAIN: dict[str, Any] = {"window": 0, "soft_cap": 0.0}


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 8, 70])
@pytest.mark.parametrize("shape", [(40, 24), (20, 20), (72, 192)])
def test_products_of_heads(
    ops: ModuleType,
    device: torch.device,
    shape: tuple[int, int],
    num_rows: int,
    dtype: str,
    out: str,
) -> None:
    matrices = [random(*shape, seed=head).to(device, DTYPES[dtype]) for head in range(3)]
    x = random(num_rows, 3 * shape[1], seed=9).to(device, DTYPES[dtype])

    def multiply(head: int, rows: torch.Tensor, bias: None) -> torch.Tensor:
        return rows.float() @ matrices[head].float().t()

    table = ExpertTable([DeviceWeight(matrix) for matrix in matrices], multiply)  # type: ignore[arg-type]
    y = ops.head_linear(x, table, out_dtype=DTYPES[out])
    columns = x.cpu().double().chunk(3, dim=1)
    parts = [c @ m.cpu().double().t() for c, m in zip(columns, matrices, strict=True)]
    sums = max(largest_sum(c, m) for c, m in zip(columns, matrices, strict=True))
    expected = torch.cat(parts, dim=1)
    assert_close(y, expected, out, sums=sums)


def attend(
    case: PagedCase,
    q: torch.Tensor,
    keys: torch.Tensor,
    scales: Scales = None,
    **settings: Any,
) -> torch.Tensor:
    y: torch.Tensor = NATIVE.attention(
        *(q, keys, keys, case.step(q.device)),
        num_q_heads=case.num_q_heads,
        scale=case.head_dim**-0.5,
        scales=scales,
        **{**PLAIN, **settings},
    )
    return y


@pytest.mark.parametrize("kilobytes", [227, 99])
@pytest.mark.parametrize("name", CASES)
def test_native_attention(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    kilobytes: int,
) -> None:
    """In the tiles of GPUs with much shared memory and with little."""
    use_cuda_kernels(device, monkeypatch)
    monkeypatch.setenv("LMI_CUDA_EMULATOR_SHARED_BYTES", str(kilobytes << 10))
    case = CASES[name]
    keys, _ = case.cache(device, torch.bfloat16, is_filled=True)
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device, torch.bfloat16)
    y = attend(case, q, keys)
    expected = case.expected_attention(q, keys, keys, scale=case.head_dim**-0.5, **PLAIN)
    assert_close(y, expected, "bf16")
    assert "the CUDA kernel has no" not in caplog.text


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stored", CODES)
def test_native_attention_over_codes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, stored: str, name: str
) -> None:
    use_cuda_kernels(device, monkeypatch)
    case = CASES[name]
    (codes, _), scales, (read, _) = coded_cache(case, device, stored)
    if isinstance(scales, CacheScales):
        alike: Scales = CacheScales(scales.keys, scales.keys)
    else:
        assert isinstance(scales, FixedScales)
        alike = FixedScales(scales.keys, scales.keys)
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device, torch.bfloat16)
    y = attend(case, q, codes, alike)
    expected = case.expected_attention(q, read, read, scale=case.head_dim**-0.5, **PLAIN)
    assert_close(y, expected, "bf16")


def test_native_results_are_of_the_keys_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit: in splits of a fixed size, whoever else is in the step, and prompts in chunks."""
    use_cuda_kernels(device, monkeypatch)
    monkeypatch.setattr(attention_lists, "SPLIT_TOKENS", 128)
    whole = PagedCase(((0, 1), (250, 1), (0, 40)), 20, 1, 576)
    alone = PagedCase(((250, 1),), 20, 1, 576)
    keys = random(1024, 1, 576).to(device, torch.bfloat16)
    q = random(42, 20 * 576).to(device, torch.bfloat16)
    placed = torch.zeros_like(keys)
    placed[alone.slots_of(alone.arrays(), 0)] = keys[whole.slots_of(whole.arrays(), 1)]
    every = attend(whole, q, keys)
    assert torch.equal(attend(alone, q[1:2], placed), every[1:2])
    tail = PagedCase(((24, 16),), 20, 1, 576)
    placed[tail.slots_of(tail.arrays(), 0)] = keys[whole.slots_of(whole.arrays(), 2)]
    assert torch.equal(attend(tail, q[26:], placed), every[26:])


def test_native_attention_shows_what_is_not_finite(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own sequence."""
    use_cuda_kernels(device, monkeypatch)
    case = PagedCase(((0, 21), (20, 1)), 2, 1, 264)
    keys, _ = case.cache(device, torch.bfloat16, is_filled=True)
    keys[case.slots_of(case.arrays(), 0)[-1], 0, 3] = torch.nan
    y = attend(case, random(22, 2 * 264).to(device, torch.bfloat16), keys)
    assert y[20].isnan().any()
    assert not y[21].isnan().any()


@pytest.mark.parametrize(
    ("settings", "missing"),
    [({"window": 20}, "no heads of 264"), ({"sinks": torch.zeros(2)}, "no ALiBi or sinks")],
)
def test_native_attention_leaves_what_it_has_not(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    missing: str,
) -> None:
    if device.type == "cuda":
        pytest.skip("Triton has no such heads")
    use_cuda_kernels(device, monkeypatch)
    case = PagedCase(((3, 1),), 2, 1, 264)
    keys, _ = case.cache(device, torch.bfloat16, is_filled=True)
    q = random(1, 2 * 264).to(device, torch.bfloat16)
    y = attend(case, q, keys, **settings)
    expected = case.expected_attention(q, keys, keys, scale=264**-0.5, **{**PLAIN, **settings})
    assert_close(y, expected, "bf16")
    assert f"the CUDA kernel has {missing}" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 3}, "of one KV head whose keys are the values"),
        ({"head_dim": 584}, "multiples of 8 up to 576 can be had"),
        ({"num_q_heads": 1025}, "at most 1024 to one"),
    ],
)
def test_native_attention_that_cannot_be_had(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    use_cuda_kernels(device, monkeypatch)
    x = torch.zeros(8, dtype=torch.bfloat16, device=device)
    given = {"num_q_heads": 4, "num_kv_heads": 1, "head_dim": 576, "scale": 1.0, **changes}
    given |= {"dtype": x.dtype, "kv_dtype": x.dtype, "num_work": 1}
    with pytest.raises(RuntimeError, match=message):
        library.call("decode_attention", x, q=x, keys=x, values=x, y=x, **given)
