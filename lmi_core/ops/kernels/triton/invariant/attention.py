"""Attention in partitions of the keys at absolute positions, the same for decodes and prefills.

A tile of 16 token rows attends to every partition on its own; a row's partitions are merged in the
order of positions. A decode is a tile with one row. Keys that a row doesn't see add exact zeros, so
that a result depends on the row's position and on the keys that it sees alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.device_step import QUERY_TILE, DeviceStep
from lmi_core.ops.device.paged_cache import Scales
from lmi_core.ops.device.step_arrays import StepArrays
from lmi_core.ops.kernels.triton.attention_tile import (
    attend_tile,
    end_of_keys,
    head_scores,
    kernel_sizes,
    relative_arguments,
)
from lmi_core.ops.kernels.triton.codes import StoredCache

PARTITION_KEYS = 256
MAX_SCORE_ROWS = 256
"""Of a tile: tokens times query heads of a key's."""
MAX_PARTIAL_BYTES = 256 << 20
"""Partial results held at once; more tiles are taken one part after the other."""
_MERGE_SIZES = ("HEAD_DIM", "BLOCK_DIM", "HAS_WINDOW", "HAS_SINKS")


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
    num_kv_heads, head_dim = keys.shape[1:]
    y = torch.empty_like(q)
    cache = StoredCache.of(keys, values, scales)
    num_partitions = triton.cdiv(int(step.host.kv_lengths.max(initial=0)), PARTITION_KEYS)
    row_shape = (num_q_heads, num_partitions)
    row_bytes = 4 * num_q_heads * num_partitions * (head_dim + 2)
    sizes = kernel_sizes(q, keys, step, num_q_heads, window, soft_cap, slopes, sinks)
    merge_sizes = {name: sizes[name] for name in _MERGE_SIZES} | {"SEES_LATER": sees_later}
    del sizes["HAS_SINKS"]
    # A tile's scores lie in shared memory, of all query heads of a key's.
    block_group = triton.next_power_of_2(sizes["GROUP"])
    query_tile = max(1, min(QUERY_TILE, MAX_SCORE_ROWS // block_group))
    for tiles, rows_per_tile in (
        (_single_tiles(step), 1),
        (step.tiles_of(query_tile), query_tile),
    ):
        most = max(1, MAX_PARTIAL_BYTES // (row_bytes * rows_per_tile))
        for part in tiles.split(most) if len(tiles) else ():
            num_rows = len(part) * rows_per_tile
            partials = q.new_empty(num_rows, *row_shape, head_dim, dtype=torch.float32)
            maxima, masses = q.new_empty(2, num_rows, *row_shape, dtype=torch.float32)
            lists = (part, step.first_rows, step.num_rows, step.kv_lengths)
            counts = (num_partitions, rows_per_tile)
            _partition_kernel[(len(part), num_kv_heads, num_partitions)](
                q,
                *cache.tensors,
                partials,
                maxima,
                masses,
                *lists,
                step.block_tables,
                step.block_tables.shape[1],
                *counts,
                q if slopes is None else slopes,
                scale * cache.fixed.keys,
                soft_cap,
                window,
                *relative_arguments(q, relative),
                SEES_LATER=sees_later,
                HAS_RELATIVE=relative is not None,
                QUERY_TILE=query_tile,
                PARTITION_KEYS=PARTITION_KEYS,
                BLOCK_GROUP=block_group,
                CODE=cache.code,
                **sizes,
            )
            _merge_kernel[(num_rows, num_q_heads)](
                partials,
                maxima,
                masses,
                y,
                *lists,
                *counts,
                q if sinks is None else sinks,
                window,
                cache.fixed.values,
                PARTITION_KEYS=PARTITION_KEYS,
                **merge_sizes,
            )
    return y


class _Tiles:
    """Tiles of the sequences with one row, for all layers of a step."""

    def __init__(self, step: DeviceStep) -> None:
        seqs = step.single_seqs
        self.tiles = torch.stack((seqs, torch.zeros_like(seqs)), dim=1)

    def refresh(self, host: StepArrays) -> None:
        """A refilled step has a row of every sequence each time."""


def _single_tiles(step: DeviceStep) -> Tensor:
    tiles = step.derived.get("single tiles")
    if tiles is None:
        tiles = step.derived["single tiles"] = _Tiles(step)
    assert isinstance(tiles, _Tiles)
    return tiles.tiles


@triton.jit(do_not_specialize=["table_stride", "num_partitions", "rows_per_tile"])
def _partition_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    partials_ptr,
    maxima_ptr,
    masses_ptr,
    tiles_ptr,
    first_rows_ptr,
    num_rows_ptr,
    kv_lengths_ptr,
    tables_ptr,
    table_stride,
    num_partitions,
    rows_per_tile,
    slopes_ptr,
    scale,
    soft_cap,
    window,
    relative_ptr,
    relative_width,
    SEES_LATER: tl.constexpr,
    HAS_RELATIVE: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    PARTITION_KEYS: tl.constexpr,
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
    IS_WIDENED: tl.constexpr,
    CODE: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    partition = tl.program_id(2)
    seq = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
    first = tl.load(tiles_ptr + 2 * tile + 1)
    num_rows = tl.load(num_rows_ptr + seq)
    num_cached = tl.load(kv_lengths_ptr + seq) - num_rows

    begin = partition * PARTITION_KEYS
    last = num_cached + tl.minimum(first + QUERY_TILE, num_rows) - 1
    end = end_of_keys(last, num_cached + num_rows, window, SEES_LATER, HAS_WINDOW)
    end = tl.minimum(begin + PARTITION_KEYS, end)
    if HAS_WINDOW:  # whole blocks that no row of the tile sees
        unseen = tl.maximum(num_cached + first + 1 - window, begin) - begin
        begin += unseen // BLOCK_KEYS * BLOCK_KEYS
    if begin < end:
        scored = tl.arange(0, QUERY_TILE * BLOCK_GROUP)
        in_tile = scored // BLOCK_GROUP
        group = scored % BLOCK_GROUP
        dims = tl.arange(0, BLOCK_DIM)
        is_scored = (first + in_tile < num_rows) & (group < GROUP)
        is_element = is_scored[:, None] & (dims[None, :] < HEAD_DIM)
        rows = tl.load(first_rows_ptr + seq).to(tl.int64) + first + in_tile
        heads = kv_head * GROUP + group
        relative_at = tl.where(is_scored, heads * relative_width + relative_width // 2, -1)
        q_at = (rows * NUM_KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
        q = tl.load(q_ptr + q_at, mask=is_element, other=0.0)
        if CODE == "":
            q = q.to(keys_ptr.dtype.element_ty)

        slopes, maximum = head_scores(slopes_ptr, q_ptr, heads, is_scored, HAS_SLOPES, False)
        mass = tl.zeros([QUERY_TILE * BLOCK_GROUP], tl.float32)
        y = tl.zeros([QUERY_TILE * BLOCK_GROUP, BLOCK_DIM], tl.float32)
        for start in range(begin, end, BLOCK_KEYS):
            maximum, mass, y = attend_tile(
                q, num_cached + first + in_tile, maximum, mass, y, start, end, keys_ptr,
                values_ptr, key_scales_ptr, value_scales_ptr, tables_ptr + seq * table_stride,
                kv_head, scale, soft_cap, window, slopes, relative_ptr, relative_at,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_DIM, BLOCK_KEYS, HAS_WINDOW,
                HAS_SOFT_CAP, HAS_SLOPES, IS_WIDENED, CODE, SEES_LATER, HAS_RELATIVE,
            )  # fmt: skip

        index = (tile * rows_per_tile + in_tile) * NUM_KV_HEADS * GROUP + heads
        result = index * num_partitions + partition
        tl.store(partials_ptr + result[:, None] * HEAD_DIM + dims[None, :], y, mask=is_element)
        tl.store(maxima_ptr + result, maximum, mask=is_scored)
        tl.store(masses_ptr + result, mass, mask=is_scored)


@triton.jit(do_not_specialize=["num_partitions", "rows_per_tile"])
def _merge_kernel(
    partials_ptr,
    maxima_ptr,
    masses_ptr,
    y_ptr,
    tiles_ptr,
    first_rows_ptr,
    num_rows_ptr,
    kv_lengths_ptr,
    num_partitions,
    rows_per_tile,
    sinks_ptr,
    window,
    value_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PARTITION_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SEES_LATER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    num_q_heads = tl.num_programs(1)
    tile = row // rows_per_tile
    seq = tl.load(tiles_ptr + 2 * tile).to(tl.int64)
    in_seq = tl.load(tiles_ptr + 2 * tile + 1) + (row % rows_per_tile).to(tl.int32)
    num_rows = tl.load(num_rows_ptr + seq)
    if in_seq < num_rows:
        kv_length = tl.load(kv_lengths_ptr + seq)
        position = kv_length - num_rows + in_seq
        begin = tl.maximum(position + 1 - window, 0) // PARTITION_KEYS if HAS_WINDOW else 0
        dims = tl.arange(0, BLOCK_DIM)
        is_dim = dims < HEAD_DIM
        results = (row * num_q_heads + head) * num_partitions
        maximum = tl.full([1], float("-inf"), tl.float32)
        mass = tl.zeros([1], tl.float32)
        if HAS_SINKS:
            maximum = tl.zeros([1], tl.float32) + tl.load(sinks_ptr + head)
            mass += 1.0
        y = tl.zeros([BLOCK_DIM], tl.float32)
        end = end_of_keys(position, kv_length, window, SEES_LATER, HAS_WINDOW)
        for partition in range(begin, (end - 1) // PARTITION_KEYS + 1):
            at = results + partition
            other = tl.load(maxima_ptr + at)
            # Every partition of this range has a key that the row sees, so none is -inf.
            largest = tl.maximum(maximum, other)
            fading, weight = tl.exp(maximum - largest), tl.exp(other - largest)
            part = tl.load(partials_ptr + at * HEAD_DIM + dims, mask=is_dim, other=0.0)
            y = y * fading + part * weight
            mass = mass * fading + tl.load(masses_ptr + at) * weight
            maximum = largest
        target = (tl.load(first_rows_ptr + seq).to(tl.int64) + in_seq) * num_q_heads + head
        y_at = y_ptr + target * HEAD_DIM + dims
        tl.store(y_at, (y * (value_scale / mass)).to(y_ptr.dtype.element_ty), mask=is_dim)
