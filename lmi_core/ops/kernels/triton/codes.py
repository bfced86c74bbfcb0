"""8-bit codes of the KV cache in kernels.

By arithmetic that every GPU and the interpreter have; where GPUs have instructions for what takes
long, reading e4m3, by those.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmi_core.ops.device.paged_cache import CacheScales, FixedScales, Scales, fixed_of

_CODES = {torch.int8: "int8", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class StoredCache(NamedTuple):
    """One layer's cache as kernels take it."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    """Keys, values and the scales of rows; without those, pointers that nobody follows."""
    fixed: FixedScales
    code: str
    """int8, e4m3, e5m2, or none where keys and values are no codes; e4nv: e4m3 that instructions
    widen."""

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, scales: Scales) -> StoredCache:
        code = _CODES.get(keys.dtype, "")
        if code.startswith("e"):
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        if code == "e4m3" and has_e4m3(keys.device):
            code = "e4nv"
        by_row = scales if isinstance(scales, CacheScales) else (keys, values)
        fixed = fixed_of(scales)
        return cls((keys, values, *by_row), fixed, code)


@functools.cache
def has_e4m3(device: torch.device) -> bool:
    """Whether the device has instructions for it: sm_89 and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def widened(codes, CODE: tl.constexpr):
    """Codes as numbers, fp32."""
    if CODE == "int8":
        return codes.to(tl.float32)
    if CODE == "e4nv":
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    upper = codes.to(tl.int16) << 8
    if CODE == "e5m2":  # the upper half of an fp16
        return upper.to(tl.float16, bitcast=True).to(tl.float32)
    # Behind the sign, an exponent with a bit less; fp16's bias is larger by 8.
    moved = (upper >> 1) & -0x4080
    value = moved.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(tl.abs(value) > 448.0, float("nan"), value)


@triton.jit
def store_head(target, x, is_dim, row_scale_ptr, fixed_scale, CODE: tl.constexpr):
    """Write a head to the cache; of int8 codes, the row's scale too."""
    if CODE == "int8":
        scale = row_scale(x)
        tl.store(row_scale_ptr, scale)
        tl.store(target, int8_codes(x, scale), mask=is_dim)
    elif CODE != "":
        tl.store(target, float8_codes(x, fixed_scale, CODE), mask=is_dim)
    else:
        tl.store(target, x.to(target.dtype.element_ty), mask=is_dim)


@triton.jit
def row_scale(x):
    """What int8 codes of the row are multiples of; NaN, which a maximum may pass over, stays."""
    unfit = tl.where(tl.abs(x) < float("inf"), 0.0, float("nan"))
    return tl.max(tl.abs(x), 0) / 127.0 + tl.sum(unfit, 0)


@triton.jit
def int8_codes(x, scale):
    """The nearest, the even one of two."""
    ROUNDER: tl.constexpr = 12582912.0  # a sum's last bit is worth 1
    is_scaled = scale > 0.0
    codes = tl.where(is_scaled, x, 0.0) / tl.where(is_scaled, scale, 1.0)
    codes = (codes + ROUNDER) - ROUNDER
    return tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int8)


@triton.jit
def float8_codes(x, scale, CODE: tl.constexpr):
    """The nearest, the even one of two: the largest for what is beyond, NaN for what isn't
    finite."""
    MANTISSA: tl.constexpr = 2 if CODE == "e5m2" else 3
    LARGEST: tl.constexpr = 57344.0 if CODE == "e5m2" else 448.0
    SMALLEST_NORMAL: tl.constexpr = 0.00006103515625 if CODE == "e5m2" else 0.015625
    BIAS: tl.constexpr = 15 if CODE == "e5m2" else 7
    # A power of two in fp32 whose last bit is worth the smallest code, and its bits.
    ORIGIN: tl.constexpr = 128.0 if CODE == "e5m2" else 16384.0
    ORIGIN_BITS: tl.constexpr = (134 << 23) if CODE == "e5m2" else (141 << 23)
    DROPPED: tl.constexpr = 23 - MANTISSA
    value = tl.div_rn(x, scale)
    size = tl.minimum(tl.abs(value), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    rounded = bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)
    normal = (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA)
    subnormal = (size + ORIGIN).to(tl.int32, bitcast=True) - ORIGIN_BITS
    sign = (value.to(tl.int32, bitcast=True) >> 24) & 0x80
    code = tl.where(size < SMALLEST_NORMAL, subnormal, normal) | sign
    return tl.where(tl.abs(value) < float("inf"), code, 0x7F).to(tl.uint8)
