"""What the CUDA kernels' accesses cost: banks of shared memory and sectors of global memory.

Run in the emulator, whose memory lies as a GPU's does, over shapes of common models.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", exc_type=ImportError)

from lmi_core.ops.device.fp8_panels import pack_fp8  # noqa: E402
from lmi_core.ops.device.paged_cache import CacheScales, FixedScales, Scales  # noqa: E402
from tests.ops.cuda_kernels import EMULATOR, RACES, use_cuda_kernels  # noqa: E402
from tests.ops.device_ops import NATIVE, packed_weight, random  # noqa: E402
from tests.ops.paged_case import PagedCase  # noqa: E402

pytestmark = pytest.mark.skipif(EMULATOR != RACES, reason="make test-races runs it")

LINE = re.compile(r"(shared|global) (read|write) (\d+) (\d+) (\d+) (.*)")


@dataclass(frozen=True)
class Site:
    """One place's accesses: turns of shared memory's banks, or sectors of 32 bytes."""

    memory: str
    access: str
    least: int
    actual: int
    place: str


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    use_cuda_kernels(torch.device("cpu"), monkeypatch)
    return NATIVE


def traffic_of(run: Callable[[], object]) -> list[Site]:
    library = ctypes.CDLL(str(RACES))
    library.lmi_traffic_end.restype = ctypes.c_char_p
    library.lmi_traffic_begin()
    run()
    lines = library.lmi_traffic_end().decode().splitlines()
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found)
    return [Site(m[1], m[2], int(m[4]), int(m[5]), m[6]) for m in found if m]


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, on 256 bytes, as a GPU's allocations are."""
    num_bytes = tensor.numel() * tensor.element_size()
    room = torch.empty(num_bytes + 256, dtype=torch.uint8)
    start = -room.data_ptr() % 256
    copy = room[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def assert_cheap(run: Callable[[], object], *, global_limit: float = 1.1) -> None:
    """No bank conflicts, and little more of global memory than is used."""
    sites = traffic_of(run)
    for memory, limit in (("shared", 1.03), ("global", global_limit)):
        own = [site for site in sites if site.memory == memory]
        actual, least = sum(site.actual for site in own), sum(site.least for site in own)
        assert actual <= least * limit, [site for site in own if site.actual > site.least]


def attention_of(
    ops: ModuleType, case: PagedCase, stored: torch.dtype, scales: Scales = None
) -> Callable[[], object]:
    cpu = torch.device("cpu")
    caches = (aligned(cache) for cache in case.cache(cpu, torch.bfloat16, is_filled=True))
    keys, values = (aligned(cache.nan_to_num().to(stored)) for cache in caches)
    q = aligned(random(case.num_tokens, case.num_q_heads * case.head_dim).bfloat16())
    settings = {"scale": case.head_dim**-0.5, "window": 0, "soft_cap": 0.0, "scales": scales}
    step = case.step(cpu)
    return lambda: ops.attention(q, keys, values, step, num_q_heads=case.num_q_heads, **settings)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_decode_attention(ops: ModuleType, head_dim: int, num_kv_heads: int) -> None:
    case = PagedCase(((511, 1), (300, 1)), 8, num_kv_heads, head_dim)
    assert_cheap(attention_of(ops, case, torch.bfloat16))


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_decode_attention_over_codes(ops: ModuleType, stored: torch.dtype) -> None:
    case = PagedCase(((511, 1),), 8, 2, 128)
    shape = (512, 2)
    scales = CacheScales(torch.ones(shape), torch.ones(shape))
    is_int8 = stored == torch.int8
    assert_cheap(attention_of(ops, case, stored, scales if is_int8 else FixedScales(1.0, 1.0)))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_attention(ops: ModuleType, head_dim: int) -> None:
    case = PagedCase(((64, 128),), 4, 1, head_dim)
    assert_cheap(attention_of(ops, case, torch.bfloat16))


@pytest.mark.parametrize("sequences", [((99, 1),), ((0, 8),)])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
def test_latent_attention(
    ops: ModuleType, stored: torch.dtype, sequences: tuple[tuple[int, int], ...]
) -> None:
    case, cpu = PagedCase(sequences, 16, 1, 576), torch.device("cpu")
    keys = aligned(case.cache(cpu, torch.bfloat16)[0].nan_to_num().to(stored))
    q = aligned(random(case.num_tokens, 16 * 576).bfloat16())
    scales = None if stored == torch.bfloat16 else FixedScales(1.0, 1.0)
    settings = {"scale": 0.1, "window": 0, "soft_cap": 0.0, "scales": scales}
    step = case.step(cpu)
    assert_cheap(lambda: ops.attention(q, keys, keys, step, num_q_heads=16, **settings))


@pytest.mark.parametrize("rows", [1, 8])
def test_few_rows(ops: ModuleType, rows: int) -> None:
    x, weight = aligned(random(rows, 2048).bfloat16()), aligned(random(64, 2048).bfloat16())
    assert_cheap(lambda: ops.linear(x, weight, None))


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_packed(ops: ModuleType, rows: int) -> None:
    weight, _ = packed_weight(64, 2048, 128, False)
    weight = replace(weight, panels=aligned(weight.panels))
    x = aligned(random(rows, 2048).bfloat16())
    assert_cheap(lambda: ops.linear_packed(x, weight, None))


def test_unpacking(ops: ModuleType) -> None:
    weight, _ = packed_weight(64, 2048, 128, True)
    weight = replace(weight, panels=aligned(weight.panels))
    x = aligned(random(130, 2048).bfloat16())
    unpacked = aligned(torch.empty(weight.unpacked_bytes, dtype=torch.uint8))
    assert_cheap(lambda: ops.linear_packed(x, weight, None, unpacked=unpacked))


@pytest.mark.parametrize("rows", [1, 16, 64, 130])
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_quantized(ops: ModuleType, format: str, rows: int) -> None:
    """Many rows' results are stored by halves of sectors, of which a thread has both."""
    if format == "int8":
        weight, _ = packed_weight(128, 1024, 0, False)
    else:
        weight = pack_fp8(
            [(random(128, 1024).to(torch.float8_e4m3fn), torch.ones(128, 1))], is_gated=False
        )
    weight = replace(weight, panels=aligned(weight.panels))
    x = aligned(random(rows, 1024).bfloat16())
    assert_cheap(lambda: ops.linear_quantized(x, weight, None), global_limit=1.2)


def test_norm_and_activation(ops: ModuleType) -> None:
    x, addend, weight = (aligned(random(*shape)) for shape in ((4, 4096), (4, 4096), (4096,)))
    assert_cheap(lambda: ops.rms_norm(x, weight, 1e-6, out_dtype=torch.bfloat16, addend=addend))
    assert_cheap(lambda: ops.gated_activation(x, "silu", out_dtype=torch.bfloat16))


@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_norm_and_activation_that_quantize(ops: ModuleType, codes: str) -> None:
    x, weight = aligned(random(4, 4096)), aligned(random(4096))
    settings = {"out_dtype": torch.bfloat16, "codes": codes}
    assert_cheap(lambda: ops.rms_norm(x, weight, 1e-6, **settings))
    assert_cheap(lambda: ops.gated_activation(x, "silu", **settings))


def test_conflicts_are_seen() -> None:
    """A column of a matrix whose rows are 32 words: all of it in one bank."""
    room = (ctypes.c_int32 * 2048)()
    library = ctypes.CDLL(str(RACES))
    sites = traffic_of(lambda: library.lmi_race_columns(room))
    turns = {(site.memory, site.access): (site.least, site.actual) for site in sites}
    assert turns["shared", "write"] == (2, 64)
    assert turns["shared", "read"] == (2, 2)
    assert turns["global", "write"] == (2 * 4, 2 * 32)
