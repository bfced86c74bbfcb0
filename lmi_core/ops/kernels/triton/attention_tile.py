"""One tile of keys and values, for the kernels of attention, and what these are compiled for."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.device_step import DeviceStep
from lmi_core.ops.kernels.triton.codes import widened

BLOCK_KEYS = 32
"""Keys that a program takes at once."""
MIN_DOT_SIZE = 16


def kernel_sizes(
    q: Tensor,
    keys: Tensor,
    step: DeviceStep,
    num_q_heads: int,
    window: int,
    soft_cap: float,
    slopes: Tensor | None,
    sinks: Tensor | None,
) -> dict[str, int]:
    """What every kernel over the cache is compiled for, by ``attend_tile``'s names."""
    num_kv_heads, head_dim = keys.shape[1:]
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_q_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": step.block_size,
        "BLOCK_DIM": max(MIN_DOT_SIZE, triton.next_power_of_2(head_dim)),
        "BLOCK_KEYS": BLOCK_KEYS,
        "HAS_WINDOW": window > 0,
        "HAS_SOFT_CAP": soft_cap > 0.0,
        "HAS_SLOPES": slopes is not None,
        "HAS_SINKS": sinks is not None,
        "IS_WIDENED": q.device.type != "cuda",
    }


def relative_arguments(q: Tensor, relative: Tensor | None) -> tuple[Tensor, int]:
    """What kernels take of it: the numbers, and how many a head has; any tensor for none."""
    return (q, 0) if relative is None else (relative, relative.shape[1])


@triton.jit
def attend_tile(
    q,
    positions,
    maximum,
    mass,
    y,
    start,
    end,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    table_ptr,
    kv_head,
    scale,
    soft_cap,
    window,
    slopes,
    relative_ptr,
    relative_at,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    IS_WIDENED: tl.constexpr,
    CODE: tl.constexpr,
    SEES_LATER: tl.constexpr,
    HAS_RELATIVE: tl.constexpr,
):
    """Take keys start .. start + BLOCK_KEYS, below end, into the running softmax of Milakov and
    Gimelshein, "Online normalizer calculation for softmax", 2018: row maxima, masses relative to
    them, and unnormalised results. ``slopes``: of rows' heads, what scores lose by distance.
    ``relative_at``: where a row's head has what is added at distance 0, at the key's position less
    the row's from there; negative: a row that isn't there. SEES_LATER: keys behind a row, too.
    CODE: keys and values are such codes; the scales of int8 rows go into the scores and the
    weights. IS_WIDENED: multiply in fp32, since Triton's interpreter takes the bits of bf16 for
    integers in tl.dot."""
    at = start + tl.arange(0, BLOCK_KEYS)
    dims = tl.arange(0, BLOCK_DIM)
    is_key = at < end
    blocks = tl.load(table_ptr + at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    slots = blocks * BLOCK_SIZE + at % BLOCK_SIZE
    heads = slots * NUM_KV_HEADS + kv_head
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    is_element = is_key[:, None] & (dims[None, :] < HEAD_DIM)

    k = tl.load(keys_ptr + offsets, mask=is_element, other=0)
    if CODE != "":
        k = widened(k, CODE).to(q.dtype)
    if IS_WIDENED:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if CODE == "int8":
        scores *= tl.load(key_scales_ptr + heads, mask=is_key, other=0.0)[None, :]
    if HAS_SOFT_CAP:
        # tanh(z) is 2 sigmoid(2 z) - 1.
        scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
    distance = positions[:, None] - at[None, :]
    if HAS_SLOPES:
        scores -= slopes[:, None] * distance.to(tl.float32)
    if HAS_RELATIVE:
        is_there = (relative_at >= 0)[:, None] & is_key[None, :]
        scores += tl.load(relative_ptr + relative_at[:, None] - distance, mask=is_there, other=0.0)
    is_seen = is_key[None, :] & (SEES_LATER | (distance >= 0))
    if HAS_WINDOW:
        is_seen = is_seen & (tl.abs(distance) < window)
    scores = tl.where(is_seen, scores, float("-inf"))

    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    # Rows that have seen no key yet: keep -inf - -inf out of exp.
    origin = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp(scores - origin[:, None])
    fading = tl.exp(maximum - origin)
    v = tl.load(values_ptr + offsets, mask=is_element, other=0)
    scaled = weights
    if CODE != "":
        v = widened(v, CODE).to(q.dtype)
    if CODE == "int8":
        scaled *= tl.load(value_scales_ptr + heads, mask=is_key, other=0.0)[None, :]
    rounded = scaled.to(v.dtype)
    if IS_WIDENED:
        rounded = rounded.to(tl.float32)
        v = v.to(tl.float32)
    y = y * fading[:, None] + tl.dot(rounded, v, input_precision="ieee")
    return new_maximum, mass * fading + tl.sum(weights, 1), y


@triton.jit
def end_of_keys(last, kv_length, window, SEES_LATER: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Before which the keys lie that the row at position ``last`` sees."""
    end = last + 1
    if SEES_LATER:
        end = kv_length
        if HAS_WINDOW:
            end = tl.minimum(last + window, kv_length)
    return end


@triton.jit
def head_scores(
    slopes_ptr,
    sinks_ptr,
    heads,
    is_head,
    HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Slopes of rows' heads, zeros if there are none, and the maxima that their softmax begins
    with: their sinks, with a mass of 1, or -inf."""
    slopes = tl.zeros([heads.shape[0]], tl.float32)
    if HAS_SLOPES:
        slopes = tl.load(slopes_ptr + heads, mask=is_head, other=0.0)
    maximum = tl.full([heads.shape[0]], float("-inf"), tl.float32)
    if HAS_SINKS:
        maximum = tl.load(sinks_ptr + heads, mask=is_head, other=float("-inf"))
    return slopes, maximum
