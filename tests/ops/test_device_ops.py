"""RMS norms, rope, gathers and copies in every implementation that this process can run,
against float64; what runs where is as in test_device_attention.py.
"""

from __future__ import annotations

from types import ModuleType

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import (  # noqa: E402
    DTYPES,
    assert_close,
    device,
    ops,
    random,
)
from tests.ops.paged_case import PagedCase  # noqa: E402

__all__ = ["device", "ops"]  # fixtures


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1), (3, 7), (2, 64), (5, 129), (0, 16), (1, 5000)]
)
@pytest.mark.parametrize("is_added", [False, True])
def test_rms_norm(
    ops: ModuleType, device: torch.device, dtype: str, rows: int, columns: int, is_added: bool
) -> None:
    x, addend, weight = random(rows, columns), random(rows, columns, seed=1), random(columns)
    for part in (x, addend):
        part[-1:] *= 3e-3  # whose squares' mean is about eps
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


@pytest.mark.parametrize(("dtype", "is_narrow"), [("fp32", False), ("bf16", False), ("bf16", True)])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "rotary"),
    [(1, 1, 16, 16), (4, 2, 32, 32), (6, 2, 48, 24), (3, 1, 80, 80), (2, 2, 8, 2)],
)
def test_rope_cache_write(
    ops: ModuleType,
    device: torch.device,
    dtype: str,
    is_narrow: bool,
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
    if is_narrow:
        qkv = qkv.bfloat16()
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


def test_rope_cache_write_of_keys_alone(ops: ModuleType, device: torch.device) -> None:
    case = PagedCase(((0, 2), (17, 1), (15, 3)), 4, 1, 24)
    step = case.step(device)
    qkv = random(case.num_tokens, 6 * 24).to(device)
    angles = random(case.max_length, 4, seed=1)
    results = []
    for is_whole in (True, False):
        keys, values = case.cache(device, torch.bfloat16, is_filled=False)
        keys.zero_()
        q = ops.rope_cache_write(
            qkv if is_whole else qkv[:, : 5 * 24].contiguous(),
            keys,
            values if is_whole else None,
            step.positions,
            step.slots,
            angles.cos().to(device),
            angles.sin().to(device),
            num_q_heads=4,
            q_norm=None,
            k_norm=None,
            norm_eps=0.0,
            out_dtype=torch.float32,
        )
        results.append((q, keys))
    for whole, alone in zip(*results, strict=True):
        assert torch.equal(whole, alone)


def test_gather_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.kernels.cuda.rows import gather_rows

    ids = torch.tensor([3, 0, 3], dtype=torch.int32)
    for columns in (5, 64):
        for dtype in (torch.float32, torch.bfloat16):
            table = random(4, columns).to(dtype)
            y = gather_rows(table.to(device), ids.to(device), 0.5)
            assert torch.equal(y.cpu(), table.float()[ids.long()] * 0.5)
            sums = gather_rows(table.to(device), ids.to(device) - 1, offset=1, added_to=y)
            assert torch.equal(sums.cpu(), table.float()[ids.long()] * 1.5)


def test_copy_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.kernels.cuda.rows import copy_blocks

    store = random(3, 5 * 16, 2, 8).to(torch.bfloat16)
    expected = store.clone()
    for source, target in ((4, 0), (2, 3)):
        expected[:, 16 * target : 16 * target + 16] = store[:, 16 * source : 16 * source + 16]
    src, dst = torch.tensor([[4, 2], [0, 3]], dtype=torch.int32).to(device)
    moved = store.to(device)
    copy_blocks(moved, src, dst, block_size=16)
    assert torch.equal(moved.cpu(), expected)
