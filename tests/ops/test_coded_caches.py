"""Ops over caches of 8-bit codes: int8 with a scale per token and head, fp8 with one for all."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device.paged_cache import CacheScales, PagedCache, Scales  # noqa: E402
from tests.ops.coded_cache import CODES, FP8, STEPS, coded_cache  # noqa: E402
from tests.ops.cuda_kernels import use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import (  # noqa: E402
    DTYPES,
    NATIVE,
    assert_close,
    device,
    ops,
    random,
    triton_ops,
)
from tests.ops.paged_case import ATTENTION_CASES, PagedCase  # noqa: E402

__all__ = ["device", "ops", "triton_ops"]  # fixtures


def rope_write(
    ops: ModuleType,
    case: PagedCase,
    device: torch.device,
    cache: tuple[torch.Tensor, torch.Tensor],
    qkv: torch.Tensor,
    scales: Scales = None,
    *,
    is_normed: bool = False,
    q_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    step = case.step(device)
    angles = random(case.max_length, case.head_dim // 2, seed=1)
    norm = random(case.head_dim, seed=2).to(device) if is_normed else None
    q: torch.Tensor = ops.rope_cache_write(
        qkv.to(device),
        *cache,
        step.positions,
        step.slots,
        angles.cos().to(device),
        angles.sin().to(device),
        num_q_heads=case.num_q_heads,
        q_norm=norm,
        k_norm=norm,
        norm_eps=1e-6,
        out_dtype=q_dtype,
        scales=scales,
    )
    return q


def row_scales(cache: tuple[torch.Tensor, torch.Tensor]) -> CacheScales:
    """Room for them."""
    return CacheScales(
        *(torch.full(codes.shape[:2], torch.nan, device=codes.device) for codes in cache)
    )


def rows_of(codes: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """On the host, as bytes: not every torch picks rows of fp8 there."""
    return codes.cpu().view(torch.uint8)[slots].view(codes.dtype)


@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("head_dim", [16, 80])
def test_rope_write_to_an_int8_cache(
    ops: ModuleType, device: torch.device, is_normed: bool, head_dim: int
) -> None:
    """Codes times scales are what a cache of fp32 gets, to half a scale; rows that aren't finite
    don't pass for others."""
    case = PagedCase(((0, 2), (17, 1), (15, 3)), 4, 2, head_dim)
    plain = case.cache(device, torch.float32, is_filled=False)
    codes = case.cache(device, torch.int8, is_filled=False)
    scales = row_scales(codes)
    qkv = random(case.num_tokens, 8 * head_dim)
    qkv[0, -1], qkv[2, -head_dim:], qkv[1, -1] = torch.nan, 0.0, -torch.inf
    results = [
        rope_write(ops, case, device, plain, qkv, is_normed=is_normed),
        rope_write(ops, case, device, codes, qkv, scales, is_normed=is_normed),
    ]
    np.testing.assert_allclose(*(result.cpu() for result in results), atol=1e-5, rtol=1e-5)
    slots = torch.from_numpy(case.step(device).host.slots).long()
    for expected, code, scale in zip(plain, codes, scales, strict=True):
        rows, steps = expected.cpu()[slots], scale.cpu()[slots].unsqueeze(-1)
        read = code.cpu()[slots] * steps
        is_finite = rows.isfinite().all(-1)
        np.testing.assert_allclose(
            steps[is_finite], rows[is_finite].abs().amax(-1, keepdim=True) / 127, rtol=1e-5
        )
        assert ((read - rows).abs() <= steps * 0.5001)[is_finite].all()
        assert not read[~is_finite].isfinite().any()
        is_touched = torch.zeros(len(scale), dtype=torch.bool)
        is_touched[slots] = True
        assert scale.cpu()[~is_touched].isnan().all()


@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("stored", FP8)
def test_rope_write_to_an_fp8_cache(
    ops: ModuleType, device: torch.device, stored: str, head_dim: int
) -> None:
    """The nearest codes of what a cache of fp32 gets, over the scale: the largest where that is too
    large, NaN where it isn't finite."""
    case = PagedCase(((0, 2), (17, 1), (15, 3)), 4, 2, head_dim)
    plain = case.cache(device, torch.float32, is_filled=False)
    codes = case.cache(device, CODES[stored], is_filled=False)
    before = codes[0].cpu().view(torch.uint8).clone()
    most = torch.finfo(CODES[stored]).max
    qkv = random(case.num_tokens, 8 * head_dim)
    qkv *= torch.exp(8 * random(case.num_tokens, 8 * head_dim, seed=3))  # some beyond fp8's range
    qkv[1, -8:] = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, 1e-9, 0.0, -0.0])
    rope_write(ops, case, device, plain, qkv)
    rope_write(ops, case, device, codes, qkv, STEPS)
    slots = torch.from_numpy(case.step(device).host.slots).long()
    for expected, code, scale in zip(plain, codes, STEPS, strict=True):
        rows = expected.cpu()[slots] / scale
        wanted = rows.clamp(-most, most).to(CODES[stored]).float()
        wanted[~rows.isfinite()] = torch.nan
        read = rows_of(code, slots).float()
        # On a GPU, one instance of the kernel may add in another order than the other.
        is_close = (read == wanted) | (read.isnan() & wanted.isnan())
        assert is_close.all() if device.type == "cpu" else is_close.float().mean() > 0.99
        np.testing.assert_allclose(read, wanted, rtol=0.26)
    untouched = torch.ones(len(before), dtype=torch.bool)
    untouched[slots] = False
    assert torch.equal(codes[0].cpu().view(torch.uint8)[untouched], before[untouched])


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize("head_dim", [10, 80, 256])
@pytest.mark.parametrize("stored", CODES)
def test_cuda_kernels_write_the_codes_of_torch(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    stored: str,
    head_dim: int,
    is_normed: bool,
    q_dtype: torch.dtype,
) -> None:
    """To the bit, from what the same kernel computes in fp32."""
    use_cuda_kernels(device, monkeypatch)
    ops = NATIVE
    reference = importlib.import_module("lmi_core.ops.kernels.torch_ops.rope")
    case = PagedCase(((0, 2), (17, 1), (15, 3)), 3, 2, head_dim)
    plain = case.cache(device, torch.float32, is_filled=False)
    codes = case.cache(device, CODES[stored], is_filled=False)
    scales = row_scales(codes) if stored == "int8" else STEPS
    qkv = random(case.num_tokens, 7 * head_dim) * 100
    options = {"is_normed": is_normed, "q_dtype": q_dtype}
    queries = rope_write(ops, case, device, plain, qkv, **options)
    assert torch.equal(rope_write(ops, case, device, codes, qkv, scales, **options), queries)
    slots = torch.from_numpy(case.step(device).host.slots).long()
    for expected, code, scale in zip(plain, codes, scales, strict=True):
        rows = expected.cpu()[slots]
        if stored == "int8":
            wanted, steps = reference._quantized(rows)
            assert torch.equal(scale.cpu()[slots], steps)
        else:
            wanted = reference._saturated(rows / scale, CODES[stored])
        wanted = wanted.to(CODES[stored]).view(torch.uint8)
        assert torch.equal(rows_of(code, slots).view(torch.uint8), wanted)


# How codes are read knows of neither; test_device_attention.py has windows and caps of every type.
@pytest.mark.parametrize(("dtype", "window", "soft_cap"), [("fp32", 20, 5.0), ("bf16", 0, 0.0)])
@pytest.mark.parametrize("name", ["decode", "chunks", "mixed"])
@pytest.mark.parametrize("stored", CODES)
def test_attention(
    ops: ModuleType,
    device: torch.device,
    dtype: str,
    window: int,
    soft_cap: float,
    name: str,
    stored: str,
) -> None:
    case = ATTENTION_CASES[name]
    codes, scales, read = coded_cache(case, device, stored)
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device, DTYPES[dtype])
    settings = {"scale": case.head_dim**-0.5, "window": window, "soft_cap": soft_cap}
    y = ops.attention(
        q, *codes, case.step(device), num_q_heads=case.num_q_heads, scales=scales, **settings
    )
    assert_close(y, case.expected_attention(q, *read, **settings), dtype)


@pytest.mark.parametrize("name", ["decode", "chunks"])
def test_attention_of_triton_with_instructions_for_e4m3(
    triton_ops: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As without them, every code among the keys."""
    codes_of_triton = importlib.import_module("lmi_core.ops.kernels.triton.codes")
    case = ATTENTION_CASES[name]
    codes, scales, _ = coded_cache(case, device, "fp8_e4m3fn")
    numbers = torch.arange(codes[1].numel(), device=device) % 0x7F  # no NaN
    codes[1].view(torch.uint8).copy_(numbers.view(codes[1].shape))
    q = random(case.num_tokens, case.num_q_heads * case.head_dim).to(device)
    if device.type == "cuda" and not codes_of_triton.has_e4m3(device):
        pytest.skip("the GPU has none")
    results = []
    for has_instructions in (False, True):
        monkeypatch.setattr(codes_of_triton, "has_e4m3", lambda _, has=has_instructions: has)
        settings = {"scale": 0.2, "window": 0, "soft_cap": 0.0, "scales": scales}
        step = case.step(device)
        results.append(
            triton_ops.attention(q, *codes, step, num_q_heads=case.num_q_heads, **settings)
        )
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("rope_cache_write", {"kv_dtype": torch.int8}, "rope_cache_write: an int8 cache without"),
        ("rope_cache_write", {"kv_dtype": 9}, "rope_cache_write: element type 9; known are 0"),
        ("decode_attention", {"kv_dtype": torch.int8}, "decode_attention: an int8 cache without"),
        (
            "prefill_attention",
            {"kv_dtype": torch.float32},
            "prefill_attention: a cache of element type 0; the queries' own, 3 (int8), 6 (e4m3)",
        ),
        (
            "decode_attention",
            {"kv_dtype": torch.bfloat16, "scale": -0.5},
            "decode_attention: scores scaled by -0.500000; numbers above 0",
        ),
        (
            "prefill_attention",
            {"kv_dtype": torch.bfloat16, "scale": 1.0, "num_work": 65536},
            "prefill_attention: a grid of 1 x 65536 x 1 blocks; at most 65535",
        ),
    ],
)
def test_what_the_cuda_kernels_refuse(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    values: dict[str, object],
    message: str,
) -> None:
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.kernels.cuda import library

    shape = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    if name != "rope_cache_write":
        shape["dtype"] = 1
    with pytest.raises(RuntimeError, match=re.escape(message)):
        library.call(name, torch.zeros(1, device=device), **shape, **values)


@pytest.mark.parametrize("stored", CODES)
def test_copied_blocks_are_whole(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, stored: str
) -> None:
    """Codes and scales, by the cache itself and by the CUDA kernel."""
    use_cuda_kernels(device, monkeypatch)
    from lmi_core.ops.kernels.cuda.rows import copy_blocks

    cache = PagedCache(
        num_layers=2,
        num_blocks=5,
        block_size=16,
        num_kv_heads=2,
        head_dim=8,
        dtype=stored,
        device=device,
    )
    for seed, store in enumerate(cache._stores):
        random_bytes = random(*store.shape[:-1], store.shape[-1] * store.element_size(), seed=seed)
        store.view(torch.uint8).copy_((40 * random_bytes).to(torch.uint8))
    before = [store.view(torch.uint8).clone() for store in cache._stores]
    src, dst = torch.tensor([[4, 2], [0, 3]], dtype=torch.int32).to(device)
    wanted = []
    for store in before:
        blocks = store.clone().unflatten(1, (5, 16))
        blocks[:, [0, 3]] = blocks[:, [4, 2]]
        wanted.append(blocks.flatten(1, 2))
    for store in cache._stores:
        copy_blocks(store, src, dst, block_size=16)
    for store, expected in zip(cache._stores, wanted, strict=True):
        assert torch.equal(store.view(torch.uint8), expected)
    for store, content in zip(cache._stores, before, strict=True):
        store.view(torch.uint8).copy_(content)
    cache.copy_blocks(src, dst)
    for store, expected in zip(cache._stores, wanted, strict=True):
        assert torch.equal(store.view(torch.uint8), expected)


@pytest.mark.parametrize(
    ("stored", "head_bytes"), [("bf16", 16), ("int8", 8 + 4), ("fp8_e4m3fn", 8), ("fp8_e5m2", 8)]
)
def test_bytes_of_a_cache(stored: str, head_bytes: int) -> None:
    cache = PagedCache(
        num_layers=3,
        num_blocks=7,
        block_size=16,
        num_kv_heads=2,
        head_dim=8,
        dtype=stored,
        device=torch.device("cpu"),
    )
    assert cache.num_bytes == 7 * 2 * 3 * 16 * 2 * head_bytes
