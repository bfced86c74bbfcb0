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


@triton.jit
def store_panels(
    sums,
    y_ptr,
    bias_ptr,
    expert,
    rows,
    is_row,
    panel,
    lane,
    num_panels,
    num_outputs,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
):
    """Add the bias to products [rows, columns] and store them: of each column the ``panel`` and its
    ``lane`` of 16, where panels of gates and of what they gate alternate if IS_GATED."""
    if IS_GATED:
        half = num_outputs // 2
        in_part = panel // 2 * 16 + lane
        output = panel % 2 * half + in_part
        is_output = (panel < num_panels) & (in_part < half)
    else:
        output = panel * 16 + lane
        is_output = (panel < num_panels) & (output < num_outputs)
    if HAS_BIAS:
        at = bias_ptr + expert * num_outputs + output
        sums += tl.load(at, mask=is_output, other=0.0)[None, :]
    y_at = y_ptr + rows.to(tl.int64)[:, None] * num_outputs + output[None, :]
    tl.store(y_at, sums, mask=is_row & is_output[None, :])
