"""Which rows and whose matrix a program has, of products with each row's own expert's."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def own_place(num_columns, BLOCK_COLUMNS: tl.constexpr):
    """Which block of columns and which tile of rows a program of a grid of one dimension has, since
    the others have 65,535 programs at most: columns of a tile one after the other."""
    num_blocks = (num_columns + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    return tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks


@triton.jit
def product_rows(
    token_rows_ptr,
    first_rows_ptr,
    num_rows,
    tile,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    IS_BY_TOKEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """A tile's expert, its rows, those of x that they are made of, and which of them there are.
    NUM_EXPERTS 0: tiles of one matrix, rows as they are."""
    expert = tile * 0
    first = tile * BLOCK_ROWS
    end = num_rows
    if NUM_EXPERTS > 0:
        experts = tl.arange(0, BLOCK_EXPERTS)
        is_expert = experts < NUM_EXPERTS
        firsts = tl.load(first_rows_ptr + experts, mask=is_expert, other=0)
        ends = tl.load(first_rows_ptr + experts + 1, mask=is_expert, other=0)
        num_tiles = (ends - firsts + BLOCK_ROWS - 1) // BLOCK_ROWS
        next_tiles = tl.cumsum(num_tiles, 0)
        # Of no expert, and without rows, behind the last tile.
        is_own = (next_tiles > tile) & (next_tiles - num_tiles <= tile)
        firsts += (tile - next_tiles + num_tiles) * BLOCK_ROWS
        expert = tl.sum(tl.where(is_own, experts, 0), 0)
        first = tl.sum(tl.where(is_own, firsts, 0), 0)
        end = tl.sum(tl.where(is_own, ends, 0), 0)
    rows = first + tl.arange(0, BLOCK_ROWS)
    is_row = rows < end
    source = rows
    if IS_BY_TOKEN:
        source = tl.load(token_rows_ptr + rows, mask=is_row, other=0)
    return expert, rows, source, is_row
