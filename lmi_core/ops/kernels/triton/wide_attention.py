"""Attention of heads over 256 dimensions, as multi-head latent attention has them: a latent and a
rotary part, one key head for all queries, and keys that are the values, too.

A head lies in registers as a power of two of its dimensions and the padded rest, which wastes less
than padding the whole. A program takes some tokens' query heads, a part of them where they are
many, over all keys, or, of single rows, over a split of them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.kernels.triton.codes import StoredCache, widened

MAX_ROWS, MIN_ROWS = 64, 16
"""Scores' rows of a program: tokens times query heads; the fewest for products of four bytes."""
BLOCK_KEYS, FEW_KEYS = 32, 16
MANY_KEYS_BYTES = 132 << 10
"""Of a block's shared memory, from which it has BLOCK_KEYS of two bytes; else FEW_KEYS fit, with
MIN_ROWS also of four."""
MIN_PART = 16
NUM_WARPS = 8


@functools.cache
def _most_rows_and_keys(dtype: torch.dtype, device: torch.device) -> tuple[int, int]:
    """Of a block, for products of that type."""
    if dtype.itemsize > 2:
        return MIN_ROWS, FEW_KEYS
    if device.type != "cuda":
        return MAX_ROWS, BLOCK_KEYS
    properties: Any = torch.cuda.get_device_properties(device)
    has_many = properties.shared_memory_per_block_optin >= MANY_KEYS_BYTES
    return MAX_ROWS, BLOCK_KEYS if has_many else FEW_KEYS


def widest_dtype(q: Tensor, cache: StoredCache) -> torch.dtype:
    """That a block holds: of queries, to which codes are widened, or of a cache without codes, to
    which queries are."""
    keys = cache.tensors[0]
    is_wider = cache.code == "" and keys.dtype.itemsize > q.dtype.itemsize
    return keys.dtype if is_wider else q.dtype


def wide_attention(
    q: Tensor,
    cache: StoredCache,
    y: Tensor,
    step: DeviceStep,
    scale: float,
    num_q_heads: int,
    splits: tuple[int, int],
) -> None:
    """Causal attention [T, hq d] -> y. ``splits``: of single rows' keys, their size and number."""
    keys, values = cache.tensors[:2]
    num_kv_heads, head_dim = keys.shape[1:]
    group = num_q_heads // num_kv_heads
    most_rows, block_keys = _most_rows_and_keys(widest_dtype(q, cache), q.device)
    block_dim = 1 << (head_dim.bit_length() - 1)
    sizes = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": step.block_size,
        "BLOCK_DIM": block_dim,
        "BLOCK_REST": max(MIN_PART, triton.next_power_of_2(head_dim - block_dim)),
        "BLOCK_KEYS": block_keys,
        "IS_LATENT": keys.data_ptr() == values.data_ptr(),
        "IS_WIDENED": q.device.type != "cuda",
        "CODE": cache.code,
    }
    lists = (step.first_rows, step.num_rows, step.kv_lengths, step.block_tables)
    settings = (step.block_tables.shape[1], scale * cache.fixed.keys, cache.fixed.values)
    block_group = min(most_rows, triton.next_power_of_2(group))
    query_tile = most_rows // block_group
    tiles = step.tiles_of(query_tile)
    if len(tiles):
        parts = triton.cdiv(group, block_group)
        _wide_kernel[(len(tiles), num_kv_heads * parts, 1)](
            *(q, *cache.tensors, y, y, tiles, *lists, *settings, 0, 1),
            IS_DECODE=False,
            IS_SPLIT=False,
            QUERY_TILE=max(query_tile, MIN_ROWS // block_group),
            TILE_TOKENS=query_tile,
            BLOCK_GROUP=block_group,
            num_warps=NUM_WARPS,
            num_stages=2,
            **sizes,
        )
    if len(step.single_seqs):
        split_size, num_splits = splits
        results, log_masses = y, y
        if num_splits > 1:
            shape = (len(step.single_seqs), num_q_heads, num_splits)
            results = q.new_empty(*shape, head_dim, dtype=torch.float32)
            log_masses = q.new_empty(shape, dtype=torch.float32)
        block_group = min(MIN_ROWS, triton.next_power_of_2(group))
        parts = triton.cdiv(group, block_group)
        _wide_kernel[(len(step.single_seqs), num_kv_heads * parts, num_splits)](
            *(q, *cache.tensors, results, log_masses, step.single_seqs, *lists, *settings),
            split_size,
            num_splits,
            IS_DECODE=True,
            IS_SPLIT=num_splits > 1,
            QUERY_TILE=MIN_ROWS // block_group,
            TILE_TOKENS=1,
            BLOCK_GROUP=block_group,
            num_warps=NUM_WARPS,
            num_stages=2,
            **sizes,
        )
        if num_splits > 1:
            _merge_wide_kernel[(len(step.single_seqs), num_q_heads)](
                *(results, log_masses, y, step.single_seqs, step.first_rows, num_splits),
                HEAD_DIM=head_dim,
                BLOCK_DIM=triton.next_power_of_2(head_dim),
            )


@triton.jit
def _part(ptr, heads, is_row, dims, HEAD_DIM: tl.constexpr, CODE: tl.constexpr):
    """Those dimensions of cached heads, as numbers."""
    at = heads[:, None] * HEAD_DIM + dims[None, :]
    x = tl.load(ptr + at, mask=is_row[:, None] & (dims[None, :] < HEAD_DIM), other=0)
    if CODE != "":
        x = widened(x, CODE)
    return x


@triton.jit(do_not_specialize=["table_stride", "split_size", "num_splits"])
def _wide_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    y_ptr,
    log_masses_ptr,
    tiles_ptr,
    first_rows_ptr,
    num_rows_ptr,
    kv_lengths_ptr,
    tables_ptr,
    table_stride,
    scale,
    value_scale,
    split_size,
    num_splits,
    IS_DECODE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    IS_LATENT: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    CODE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    PARTS: tl.constexpr = (GROUP + BLOCK_GROUP - 1) // BLOCK_GROUP
    kv_head = tl.program_id(1) // PARTS
    first = 0
    if IS_DECODE:
        seq = tl.load(tiles_ptr + tile).to(tl.int64)
    else:
        seq = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
        first = tl.load(tiles_ptr + 2 * tile + 1)
    num_rows = tl.load(num_rows_ptr + seq)
    num_cached = tl.load(kv_lengths_ptr + seq) - num_rows

    # Rows of the score matrix: the part's query heads for every token of the tile.
    scored = tl.arange(0, QUERY_TILE * BLOCK_GROUP)
    in_tile = scored // BLOCK_GROUP
    in_seq = first + in_tile
    in_group = tl.program_id(1) % PARTS * BLOCK_GROUP + scored % BLOCK_GROUP
    is_scored = (in_tile < TILE_TOKENS) & (in_seq < num_rows) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    rows = tl.load(first_rows_ptr + seq).to(tl.int64) + in_seq
    q_heads = rows * (NUM_KV_HEADS * GROUP) + head
    dims = tl.arange(0, BLOCK_DIM)
    rest = BLOCK_DIM + tl.arange(0, BLOCK_REST)
    q = _part(q_ptr, q_heads, is_scored, dims, HEAD_DIM, "")
    q_rest = _part(q_ptr, q_heads, is_scored, rest, HEAD_DIM, "")
    if CODE == "":
        q = q.to(keys_ptr.dtype.element_ty)
        q_rest = q_rest.to(keys_ptr.dtype.element_ty)

    begin = 0
    end = num_cached + tl.minimum(first + TILE_TOKENS, num_rows)
    if IS_SPLIT:
        begin = tl.program_id(2) * split_size
        end = tl.minimum(begin + split_size, end)
    maximum = tl.full([QUERY_TILE * BLOCK_GROUP], float("-inf"), tl.float32)
    mass = tl.zeros([QUERY_TILE * BLOCK_GROUP], tl.float32)
    y = tl.zeros([QUERY_TILE * BLOCK_GROUP, BLOCK_DIM], tl.float32)
    y_rest = tl.zeros([QUERY_TILE * BLOCK_GROUP, BLOCK_REST], tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        at = start + tl.arange(0, BLOCK_KEYS)
        is_key = at < end
        table = tables_ptr + seq * table_stride
        blocks = tl.load(table + at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        heads = (blocks * BLOCK_SIZE + at % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        k = _part(keys_ptr, heads, is_key, dims, HEAD_DIM, CODE).to(q.dtype)
        k_rest = _part(keys_ptr, heads, is_key, rest, HEAD_DIM, CODE).to(q.dtype)
        v = k
        v_rest = k_rest
        if not IS_LATENT:
            v = _part(values_ptr, heads, is_key, dims, HEAD_DIM, CODE).to(q.dtype)
            v_rest = _part(values_ptr, heads, is_key, rest, HEAD_DIM, CODE).to(q.dtype)
        left = q
        left_rest = q_rest
        if IS_WIDENED:  # the interpreter's products of 16 bits don't sum in fp32
            left, left_rest = q.to(tl.float32), q_rest.to(tl.float32)
            k, k_rest = k.to(tl.float32), k_rest.to(tl.float32)
            v, v_rest = v.to(tl.float32), v_rest.to(tl.float32)
        scores = tl.dot(left, tl.trans(k), input_precision="ieee")
        scores = tl.dot(left_rest, tl.trans(k_rest), scores, input_precision="ieee") * scale
        if CODE == "int8":
            scores *= tl.load(key_scales_ptr + heads, mask=is_key, other=0.0)[None, :]
        is_seen = is_key[None, :] & (at[None, :] <= (num_cached + in_seq)[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # Rows that have seen no key yet: keep -inf - -inf out of exp.
        origin = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp(scores - origin[:, None])
        fading = tl.exp(maximum - origin)
        mass = mass * fading + tl.sum(weights, 1)
        if CODE == "int8":
            weights *= tl.load(value_scales_ptr + heads, mask=is_key, other=0.0)[None, :]
        weights = weights.to(q.dtype).to(v.dtype)
        y = y * fading[:, None] + tl.dot(weights, v, input_precision="ieee")
        y_rest = y_rest * fading[:, None] + tl.dot(weights, v_rest, input_precision="ieee")
        maximum = new_maximum

    # A split without keys has mass 0: its log is -inf and its result 0.
    divisor = tl.where(mass > 0.0, mass, 1.0)
    target = q_heads
    if IS_SPLIT:
        target = (tile * (NUM_KV_HEADS * GROUP) + head) * num_splits + tl.program_id(2)
        log_mass = tl.where(mass > 0.0, maximum + tl.log(divisor), float("-inf"))
        tl.store(log_masses_ptr + target, log_mass, mask=is_scored)
    factor = (value_scale / divisor)[:, None]
    y_at = y_ptr + target[:, None] * HEAD_DIM
    is_there = is_scored[:, None]
    element = y_ptr.dtype.element_ty
    tl.store(y_at + dims[None, :], (y * factor).to(element), mask=is_there)
    is_rest = is_there & (rest[None, :] < HEAD_DIM)
    tl.store(y_at + rest[None, :], (y_rest * factor).to(element), mask=is_rest)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_wide_kernel(
    partials_ptr,
    log_masses_ptr,
    y_ptr,
    seqs_ptr,
    first_rows_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_q_heads = tl.num_programs(1)
    dims = tl.arange(0, BLOCK_DIM)
    is_dim = dims < HEAD_DIM
    first = (index * num_q_heads + head) * num_splits
    # The first split has keys.
    maximum = tl.load(log_masses_ptr + first)
    mass = maximum * 0.0 + 1.0
    y = tl.load(partials_ptr + first * HEAD_DIM + dims, mask=is_dim, other=0.0)
    for split in range(1, num_splits):
        log_mass = tl.load(log_masses_ptr + first + split)
        largest = tl.maximum(maximum, log_mass)
        fading, weight = tl.exp(maximum - largest), tl.exp(log_mass - largest)
        at = (first + split) * HEAD_DIM + dims
        y = y * fading + weight * tl.load(partials_ptr + at, mask=is_dim, other=0.0)
        mass = mass * fading + weight
        maximum = largest
    row = tl.load(first_rows_ptr + tl.load(seqs_ptr + index)).to(tl.int64)
    target = y_ptr + (row * num_q_heads + head) * HEAD_DIM + dims
    tl.store(target, (y / mass).to(y_ptr.dtype.element_ty), mask=is_dim)
