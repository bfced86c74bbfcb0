"""Attention over the paged cache: split over the keys for single rows, in tiles for prefills."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.device.paged_cache import Scales
from lmi_core.ops.kernels.triton.attention_tile import (
    BLOCK_KEYS,
    MIN_DOT_SIZE,
    attend_tile,
    end_of_keys,
    head_scores,
    kernel_sizes,
    relative_arguments,
)
from lmi_core.ops.kernels.triton.codes import StoredCache
from lmi_core.ops.kernels.triton.wide_attention import wide_attention

NUM_PROGRAMS = 264
"""Programs that a decode should at least have, by splitting the keys: two per multiprocessor of
the largest GPUs now in use."""
MIN_SPLIT_KEYS = 256
DECODE_SCORES = 1024
"""Of a decode's tile: keys times query heads of a group. By the machine code, two programs of a
multiprocessor with 32 keys of 128 numbers keep so little under way that they read at two thirds of
a memory's rate, with 64 at all of it. Of wider heads 32 have as many bytes, and codes are widened
in registers, which 64 take so many of that fewer programs are there."""
TILE_ROWS = 128
"""Of a prefill's scores: tokens times query heads of a group; half as many of wide heads, whose
results take the registers."""
NARROW_HEAD_DIM = 128
MAX_HEAD_DIM = 256
"""That these kernels keep in registers; wide_attention.py has wider ones."""


def attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    step: DeviceStep,
    *,
    num_q_heads: int,
    scale: float,
    window: int,
    soft_cap: float,
    scales: Scales = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    sees_later: bool = False,
    relative: Tensor | None = None,
) -> Tensor:
    """As ``torch_ops`` has it."""
    sizes = kernel_sizes(q, keys, step, num_q_heads, window, soft_cap, slopes, sinks)
    cache = StoredCache.of(keys, values, scales)
    if keys.shape[-1] > MAX_HEAD_DIM:
        others = (slopes, sinks, relative)
        if window or soft_cap or sees_later or any(other is not None for other in others):
            raise ValueError(f"heads of {keys.shape[-1]} with windows, caps, slopes or sinks")
        y = torch.empty_like(q)
        splits = _splits(step, 0, keys.shape[1] * triton.cdiv(sizes["GROUP"], MIN_DOT_SIZE))
        wide_attention(q, cache, y, step, scale, num_q_heads, splits)
        return y
    of_heads = (q if slopes is None else slopes, q if sinks is None else sinks)
    settings = (*of_heads, scale * cache.fixed.keys, soft_cap, window, cache.fixed.values)
    y = torch.empty_like(q)
    if len(step.single_seqs):
        _decode(q, cache, y, step, settings, sizes)
    query_tile = tile_tokens(sizes["GROUP"], sizes["HEAD_DIM"])
    tiles = step.tiles_of(query_tile)
    if len(tiles):
        _prefill_kernel[(len(tiles), sizes["NUM_KV_HEADS"])](
            q,
            *cache.tensors,
            y,
            tiles,
            step.first_rows,
            step.num_rows,
            step.kv_lengths,
            step.block_tables,
            step.block_tables.shape[1],
            *settings,
            *relative_arguments(q, relative),
            SEES_LATER=sees_later,
            HAS_RELATIVE=relative is not None,
            QUERY_TILE=query_tile,
            BLOCK_GROUP=triton.next_power_of_2(sizes["GROUP"]),
            CODE=cache.code,
            **sizes,
        )
    return y


def tile_tokens(group: int, head_dim: int) -> int:
    """Tokens of a prefill's tile, for a group of so many query heads."""
    rows = TILE_ROWS if head_dim <= NARROW_HEAD_DIM else TILE_ROWS // 2
    tokens: int = rows // triton.next_power_of_2(group)
    return max(1, tokens)


def decode_keys(block_group: int, head_dim: int, code: str) -> int:
    """Keys that a decode takes at once, for so many rows of scores."""
    if code or head_dim > NARROW_HEAD_DIM:
        return BLOCK_KEYS
    return max(BLOCK_KEYS, min(2 * BLOCK_KEYS, DECODE_SCORES // block_group))


def _decode(
    q: Tensor,
    cache: StoredCache,
    y: Tensor,
    step: DeviceStep,
    settings: tuple[Tensor, Tensor, float, float, int, float],
    sizes: dict[str, int],
) -> None:
    """Sequences with one row: partial results per split of the keys, then their merge."""
    num_seqs, num_kv_heads = len(step.single_seqs), sizes["NUM_KV_HEADS"]
    num_q_heads = num_kv_heads * sizes["GROUP"]
    block_group = max(MIN_DOT_SIZE, triton.next_power_of_2(sizes["GROUP"]))
    split_size, num_splits = _splits(step, settings[4], num_kv_heads)
    shape = (num_seqs, num_q_heads, num_splits)
    partials = torch.empty(*shape, sizes["HEAD_DIM"], dtype=torch.float32, device=q.device)
    log_masses = torch.empty(shape, dtype=torch.float32, device=q.device)
    _decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        q,
        *cache.tensors,
        partials,
        log_masses,
        step.single_seqs,
        step.first_rows,
        step.kv_lengths,
        step.block_tables,
        step.block_tables.shape[1],
        *settings,
        split_size,
        num_splits,
        BLOCK_GROUP=block_group,
        CODE=cache.code,
        **{**sizes, "BLOCK_KEYS": decode_keys(block_group, sizes["HEAD_DIM"], cache.code)},
    )
    _merge_kernel[(num_seqs, num_q_heads)](
        partials,
        log_masses,
        y,
        step.single_seqs,
        step.first_rows,
        num_splits,
        num_q_heads,
        HEAD_DIM=sizes["HEAD_DIM"],
        BLOCK_DIM=sizes["BLOCK_DIM"],
        BLOCK_SPLITS=triton.next_power_of_2(num_splits),
    )


def _splits(step: DeviceStep, window: int, programs_of_a_row: int) -> tuple[int, int]:
    """Keys per split of the sequences with one row, and the number of splits."""
    num_keys = int(step.host.kv_lengths[step.host.num_rows == 1].max(initial=1))
    if window:
        num_keys = min(num_keys, window)
    return choose_splits(num_keys, len(step.single_seqs) * programs_of_a_row or 1)


def choose_splits(num_keys: int, num_programs: int) -> tuple[int, int]:
    """Keys per split, whole blocks of them, and the number of splits."""
    wanted = triton.cdiv(NUM_PROGRAMS, num_programs)
    num_splits = max(1, min(wanted, num_keys // MIN_SPLIT_KEYS))
    split_size = triton.cdiv(triton.cdiv(num_keys, num_splits), BLOCK_KEYS) * BLOCK_KEYS
    return split_size, triton.cdiv(num_keys, split_size)


# Another step's lengths shall not compile another kernel.
@triton.jit(do_not_specialize=["table_stride", "split_size", "num_splits"])
def _decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    partials_ptr,
    log_masses_ptr,
    seqs_ptr,
    first_rows_ptr,
    kv_lengths_ptr,
    tables_ptr,
    table_stride,
    slopes_ptr,
    sinks_ptr,
    scale,
    soft_cap,
    window,
    value_scale,
    split_size,
    num_splits,
    BLOCK_GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    CODE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    seq = tl.load(seqs_ptr + index).to(tl.int64)
    row = tl.load(first_rows_ptr + seq).to(tl.int64)
    kv_length = tl.load(kv_lengths_ptr + seq)
    first_key = tl.maximum(kv_length - window, 0) if HAS_WINDOW else 0
    begin = first_key + split * split_size
    end = tl.minimum(begin + split_size, kv_length)

    group = tl.arange(0, BLOCK_GROUP)
    dims = tl.arange(0, BLOCK_DIM)
    is_element = (group[:, None] < GROUP) & (dims[None, :] < HEAD_DIM)
    heads = kv_head * GROUP + group
    q_at = (row * NUM_KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=is_element, other=0.0)
    if CODE == "":
        q = q.to(keys_ptr.dtype.element_ty)

    positions = tl.zeros([BLOCK_GROUP], tl.int32) + kv_length - 1
    slopes, maximum = head_scores(
        slopes_ptr, sinks_ptr, heads, group < GROUP, HAS_SLOPES, HAS_SINKS
    )
    # A sink is the first split's.
    maximum = tl.where(split == 0, maximum, float("-inf"))
    mass = tl.where(maximum > float("-inf"), 1.0, 0.0)
    y = tl.zeros([BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        maximum, mass, y = attend_tile(
            q, positions, maximum, mass, y, start, end, keys_ptr, values_ptr,
            key_scales_ptr, value_scales_ptr, tables_ptr + seq * table_stride, kv_head,
            scale, soft_cap, window, slopes, slopes_ptr, 0,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_DIM, BLOCK_KEYS, HAS_WINDOW, HAS_SOFT_CAP,
            HAS_SLOPES, IS_WIDENED, CODE, False, False,
        )  # fmt: skip

    # A split without keys has mass 0: its log is -inf and its result 0.
    divisor = tl.where(mass > 0.0, mass, 1.0)
    result = (index * NUM_KV_HEADS * GROUP + heads) * num_splits + split
    tl.store(
        partials_ptr + result[:, None] * HEAD_DIM + dims[None, :],
        y * (value_scale / divisor)[:, None],
        mask=is_element,
    )
    log_mass = tl.where(mass > 0.0, maximum + tl.log(divisor), float("-inf"))
    tl.store(log_masses_ptr + result, log_mass, mask=group < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    partials_ptr,
    log_masses_ptr,
    y_ptr,
    seqs_ptr,
    first_rows_ptr,
    num_splits,
    num_q_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_DIM)
    is_split = splits < num_splits
    is_dim = dims < HEAD_DIM
    at = (index * num_q_heads + head) * num_splits + splits
    log_masses = tl.load(log_masses_ptr + at, mask=is_split, other=float("-inf"))
    weights = tl.exp(log_masses - tl.max(log_masses, 0))
    partials = tl.load(
        partials_ptr + at[:, None] * HEAD_DIM + dims[None, :],
        mask=is_split[:, None] & is_dim[None, :],
        other=0.0,
    )
    y = tl.sum(partials * weights[:, None], 0) / tl.sum(weights, 0)
    row = tl.load(first_rows_ptr + tl.load(seqs_ptr + index)).to(tl.int64)
    target = y_ptr + (row * num_q_heads + head) * HEAD_DIM + dims
    tl.store(target, y.to(y_ptr.dtype.element_ty), mask=is_dim)


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    y_ptr,
    tiles_ptr,
    first_rows_ptr,
    num_rows_ptr,
    kv_lengths_ptr,
    tables_ptr,
    table_stride,
    slopes_ptr,
    sinks_ptr,
    scale,
    soft_cap,
    window,
    value_scale,
    relative_ptr,
    relative_width,
    SEES_LATER: tl.constexpr,
    HAS_RELATIVE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    CODE: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    num_rows = tl.load(num_rows_ptr + seq)
    num_cached = tl.load(kv_lengths_ptr + seq) - num_rows

    # Rows of the score matrix: every query head of the group for every token of the tile.
    scored = tl.arange(0, QUERY_TILE * BLOCK_GROUP)
    in_seq = first + scored // BLOCK_GROUP
    group = scored % BLOCK_GROUP
    dims = tl.arange(0, BLOCK_DIM)
    is_scored = (in_seq < num_rows) & (group < GROUP)
    is_element = is_scored[:, None] & (dims[None, :] < HEAD_DIM)
    rows = tl.load(first_rows_ptr + seq).to(tl.int64) + in_seq
    at = ((rows * NUM_KV_HEADS + kv_head) * GROUP + group)[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_ptr + at, mask=is_element, other=0.0)
    if CODE == "":
        q = q.to(keys_ptr.dtype.element_ty)

    begin = tl.maximum(num_cached + first + 1 - window, 0) if HAS_WINDOW else 0
    last = num_cached + tl.minimum(first + QUERY_TILE, num_rows) - 1
    end = end_of_keys(last, num_cached + num_rows, window, SEES_LATER, HAS_WINDOW)
    heads = kv_head * GROUP + group
    relative_at = tl.where(is_scored, heads * relative_width + relative_width // 2, -1)
    slopes, maximum = head_scores(slopes_ptr, sinks_ptr, heads, is_scored, HAS_SLOPES, HAS_SINKS)
    mass = tl.where(maximum > float("-inf"), 1.0, 0.0)
    y = tl.zeros([QUERY_TILE * BLOCK_GROUP, BLOCK_DIM], tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        maximum, mass, y = attend_tile(
            q, num_cached + in_seq, maximum, mass, y, start, end, keys_ptr, values_ptr,
            key_scales_ptr, value_scales_ptr, tables_ptr + seq * table_stride, kv_head,
            scale, soft_cap, window, slopes, relative_ptr, relative_at,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_DIM, BLOCK_KEYS, HAS_WINDOW, HAS_SOFT_CAP,
            HAS_SLOPES, IS_WIDENED, CODE, SEES_LATER, HAS_RELATIVE,
        )  # fmt: skip
    y *= (value_scale / tl.where(mass > 0.0, mass, 1.0))[:, None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=is_element)
