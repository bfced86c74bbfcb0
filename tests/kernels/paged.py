"""Float64 references and helpers for the kernels around the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmi_core import _native

KEY_GROUP = 16

FLOAT_LEVELS = [
    level
    for level in _native.instruction_sets()
    if not level.endswith(("_vnni", "_dotprod", "amx"))
]
"""Without those that multiply bytes alone otherwise (``LMI_BYTE_DOT``), which attention doesn't,
and amx, whose attention is avx512_bf16's."""
VECTORS = [level for level in FLOAT_LEVELS if not level.endswith("_bf16")]
"""One of each vector layer: where neither bytes nor bf16 are multiplied (sampling, rotation, norms)
the others have its code."""


def to_bf16(x: npt.NDArray[np.floating]) -> npt.NDArray[np.uint16]:
    """Nearest bf16, ties to even, as uint16."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (x.astype(np.uint32) << 16).view(np.float32)


def as_float(x: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    return from_bf16(x) if x.dtype == np.uint16 else x.astype(np.float32)


def quantize_rows(
    x: npt.NDArray[np.floating],
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Codes of the last axis, and their scale, a 127th of the largest; NaN becomes a NaN scale."""
    x = x.astype(np.float32)
    scale = np.abs(x).max(-1, keepdims=True) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.nan_to_num(np.rint(x * (np.float32(1) / scale)))
    return codes.clip(-127, 127).astype(np.int8), scale


FLOAT_BYTES = {"e4m3": (3, 7, 0x7E), "e5m2": (2, 15, 0x7B)}
"""Bits behind the leading one, the exponents' bias, and the largest number's code."""


def numbers_of_bytes(dtype: str) -> npt.NDArray[np.float64]:
    """By code, those that aren't negative, ascending."""
    fraction, bias, most = FLOAT_BYTES[dtype]
    exponents, rest = np.divmod(np.arange(most + 1), 1 << fraction)
    ones = np.where(exponents > 0, 1 << fraction, 0)
    return (ones + rest) * 2.0 ** (np.maximum(exponents, 1) - bias - fraction)


def to_float_bytes(x: npt.NDArray[np.floating], dtype: str) -> npt.NDArray[np.uint8]:
    """The nearest, ties to even; what is larger than all of them becomes the largest."""
    numbers = numbers_of_bytes(dtype)
    between = (numbers[1:] + numbers[:-1]) / 2
    codes = np.searchsorted(between, np.abs(x))
    is_tie = np.abs(x) == between[np.minimum(codes, len(between) - 1)]
    codes = np.where(np.isnan(x), 0x7F, codes + (is_tie & (codes % 2 == 1)))
    return (codes | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def from_float_bytes(codes: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    numbers = np.full(128, np.nan)
    known = numbers_of_bytes(dtype)
    numbers[: len(known)] = known
    return np.concatenate([numbers, -numbers])[codes].astype(np.float32)


@dataclass
class CacheShape:
    """A cache and what its memory means, by the description in kv_layout.h."""

    num_layers: int = 1
    num_blocks: int = 8
    block_size: int = 16
    num_kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "fp32"
    is_latent: bool = False

    def __post_init__(self) -> None:
        self.native = _native.paged_kernels.Cache(
            num_layers=self.num_layers,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            is_latent=self.is_latent,
            fixed_scales=self.fixed_scales.ravel().tolist(),
        )
        num_parts = 1 if self.is_latent else 2
        memory: npt.NDArray[np.generic] = self.native.memory
        self.step = 1 if self.dtype == "fp32" else 2
        if self.dtype == "int8":
            self.raw = memory.reshape(
                self.num_layers,
                self.num_blocks,
                num_parts,
                self.num_kv_heads,
                self.block_size * (self.head_dim + 4),
            )
            return
        element = {"bf16": np.uint16, "fp32": np.float32}.get(self.dtype, np.uint8)
        elements = memory.view(element)
        self.raw = elements.reshape(
            self.num_layers,
            self.num_blocks,
            num_parts,
            self.num_kv_heads,
            self.block_size * self.head_dim,
        )

    @property
    def fixed_scales(self) -> npt.NDArray[np.float32]:
        """[layers, 2], of K and V, of floats of a byte; else none."""
        if self.dtype not in FLOAT_BYTES:
            return np.empty((0, 2), np.float32)
        return np.linspace(0.03, 0.2, 2 * self.num_layers, dtype=np.float32).reshape(-1, 2)

    def fixed(self, part: int) -> npt.NDArray[np.float32]:
        return self.fixed_scales[:, part if not self.is_latent else 0, None, None, None, None]

    def stored(self, part: int) -> npt.NDArray[np.generic]:
        """K (0) or V (1) of all blocks in the order of memory, without scales."""
        return self.raw[:, :, part, :, : self.block_size * self.head_dim]

    def scales(self, part: int) -> npt.NDArray[np.float32]:
        """[layers, blocks, heads, block, 1] of int8, a copy."""
        scales = np.ascontiguousarray(self.raw[:, :, part, :, self.block_size * self.head_dim :])
        return scales.view(np.float32)[..., None]

    def decode(self, x: npt.NDArray[np.generic], part: int) -> npt.NDArray[np.generic]:
        if self.dtype in FLOAT_BYTES:
            return from_float_bytes(x, self.dtype) * self.fixed(part)
        if self.dtype != "int8":
            return x
        return x.view(np.int8).astype(np.float32) * self.scales(part)

    def keys(self) -> npt.NDArray[np.generic]:
        """[layers, blocks, heads, block, dim], a copy."""
        step = self.step
        groups = self.block_size // KEY_GROUP
        k = self.stored(0).reshape(
            *self.raw.shape[:2],
            self.num_kv_heads,
            groups,
            self.head_dim // step,
            KEY_GROUP,
            step,
        )
        k = np.moveaxis(k, 4, 5)  # layers, blocks, heads, groups, token, dim / step, step
        k = k.reshape(*self.raw.shape[:2], self.num_kv_heads, self.block_size, self.head_dim)
        return self.decode(k.copy(), 0)

    def values(self) -> npt.NDArray[np.generic]:
        """[layers, blocks, heads, block, dim], a copy."""
        if self.is_latent:
            return self.keys()
        step = self.step
        v = self.stored(1).reshape(
            *self.raw.shape[:2], self.num_kv_heads, self.block_size // step, self.head_dim, step
        )
        v = np.moveaxis(v, 5, 4)
        v = v.reshape(*self.raw.shape[:2], self.num_kv_heads, self.block_size, self.head_dim)
        return self.decode(v.copy(), 1)

    def encode(self, x: npt.NDArray[np.float32], part: int) -> npt.NDArray[np.uint8]:
        """Codes of a byte; int8's scales are written."""
        if self.dtype in FLOAT_BYTES:
            return to_float_bytes(x / self.fixed(part), self.dtype)
        codes, scale = quantize_rows(x)
        values = np.ascontiguousarray(scale[..., 0]).view(np.uint8)
        self.raw[:, :, part, :, self.block_size * self.head_dim :] = values
        return codes.view(np.uint8)

    def write(self, k: npt.NDArray[np.float32], v: npt.NDArray[np.float32]) -> None:
        """Set everything from [layers, blocks, heads, block, dim] arrays."""
        step = self.step
        convert = to_bf16 if self.dtype == "bf16" else np.asarray
        if self.dtype in ("int8", *FLOAT_BYTES):
            k = self.encode(k, 0)
            v = v if self.is_latent else self.encode(v, 1)
        shape = self.raw.shape[:2]
        flat = (*shape, self.num_kv_heads, self.block_size * self.head_dim)
        k = convert(k).reshape(
            *shape,
            self.num_kv_heads,
            self.block_size // KEY_GROUP,
            KEY_GROUP,
            self.head_dim // step,
            step,
        )
        self.stored(0)[:] = np.moveaxis(k, 4, 5).reshape(flat)
        if self.is_latent:
            return
        v = convert(v).reshape(
            *shape, self.num_kv_heads, self.block_size // step, step, self.head_dim
        )
        self.stored(1)[:] = np.moveaxis(v, 4, 5).reshape(flat)


def reference_attention(
    q: npt.NDArray[np.floating],
    k: npt.NDArray[np.floating],
    v: npt.NDArray[np.floating],
    *,
    start: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    slopes: npt.ArrayLike | None = None,
) -> npt.NDArray[np.float64]:
    """q [rows, hq, d] at positions from start; k, v [tokens, hkv, d] -> [rows, hq, d]."""
    rows, num_q_heads, _ = q.shape
    group = num_q_heads // k.shape[1]
    k = np.repeat(k.astype(np.float64), group, axis=1)
    v = np.repeat(v.astype(np.float64), group, axis=1)
    scores = np.einsum("rhd,thd->hrt", q.astype(np.float64), k) * scale
    if soft_cap > 0:
        scores = soft_cap * np.tanh(scores / soft_cap)
    position = start + np.arange(rows)[:, None]
    token = np.arange(k.shape[0])[None, :]
    if slopes is not None:
        scores = scores + np.asarray(slopes, np.float32)[:, None, None] * (token - position)
    seen = token <= position
    if window > 0:
        seen &= token > position - window
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hrt,thd->rhd", weights, v)
