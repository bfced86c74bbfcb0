"""A layer's codes and scales as the engine keeps them: to the bit, or widened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lmi_core.weights.block_matrix import BlockMatrix
from lmi_core.weights.formats import BlockFormat, FloatArray
from lmi_core.weights.integer_matrix import INT8_ZERO, Codes, IntegerMatrix
from lmi_core.weights.quantized.layout import Blocks, LayerTensors, WidenedMatrix

NUM_BITS = (4, 8)
"""That products have."""
_GROUP_SIZES = (128, 64, 32)
_MOST_FP16 = 65504
_BLOCK = 32
Groups = npt.NDArray[np.intp]
"""The group of every input [inputs]."""


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """What a layout reads: codes [outputs, inputs], scales and zero points [outputs, groups],
    all of them contiguous."""

    codes: Callable[[], npt.NDArray[np.uint8]]
    scales: Callable[[], FloatArray]
    zeros: Callable[[], npt.NDArray[np.generic]]
    scales_suffix: str


def groups_in_order(num_inputs: int, group_size: int | None) -> Groups:
    """Neighbouring inputs in groups of ``group_size``; None: all in one."""
    return np.arange(num_inputs) // (group_size or num_inputs)


def stored_groups(layer: LayerTensors, suffix: str, num_groups: int) -> Groups:
    """As the layer's tensor ``suffix`` says; ModelError for groups that there aren't."""
    groups = layer.integers(layer[suffix]).astype(np.intp)
    if groups.min() < 0 or groups.max() >= num_groups:
        wrong = groups.min() if groups.min() < 0 else groups.max()
        raise layer.error(suffix, f"names group {wrong}; there are {num_groups}")
    return groups


def keep_codes(
    layer: LayerTensors, num_bits: int, groups: Groups, stored: StoredCodes
) -> IntegerMatrix | WidenedMatrix:
    """The layer in int4 or int8; or, where products have no such groups or zero points, in blocks
    of 32 inputs that stand for the same numbers; or else in floats."""
    if num_bits == 8:
        kept = _keep_int8(layer, groups, stored)
    else:
        kept = _keep_int4(layer, groups, stored) if num_bits == 4 else None
    if kept is not None:
        return kept
    widened = _widened(layer, num_bits, groups, stored)
    if num_bits != 4:
        return widened
    order = np.argsort(groups, kind="stable")
    ordered = _keep_int4(layer, groups[order], stored, order.astype(np.int32))
    return replace(widened, ordered=ordered)


def _keep_int4(
    layer: LayerTensors,
    groups: Groups,
    stored: StoredCodes,
    order: npt.NDArray[np.int32] | None = None,
) -> IntegerMatrix | None:
    """``order``: of the stored inputs, those that ``groups`` are of; None: all as they are."""
    group_size = _kept_group_size(groups)
    if group_size is None:
        return None
    chosen = groups[::group_size]

    def unpack() -> Codes:
        codes, scales = stored.codes(), _in_fp16(layer, stored)[:, chosen]
        codes = codes if order is None else np.ascontiguousarray(codes[:, order])
        return Codes(codes, scales, stored.zeros()[:, chosen].astype(np.float32))

    return IntegerMatrix("int4", layer.shape, group_size, unpack, order=order)


def _kept_group_size(groups: Groups) -> int | None:
    """The most neighbours that always share a scale, of the sizes that there are."""
    for size in _GROUP_SIZES:
        firsts = np.repeat(groups[::size], size)[: len(groups)]
        if np.array_equal(firsts, groups):
            return size
    return None


def _keep_int8(layer: LayerTensors, groups: Groups, stored: StoredCodes) -> IntegerMatrix | None:
    if (groups != groups[0]).any():
        return None
    zeros = stored.zeros()[:, groups[:1]].astype(np.float32)
    if (zeros != INT8_ZERO).any():
        return None

    def unpack() -> Codes:
        scales = _finite_scales(layer, stored)
        return Codes(stored.codes(), scales[:, groups[:1]], zeros)

    return IntegerMatrix("int8", layer.shape, 0, unpack)


def _widened(
    layer: LayerTensors, num_bits: int, groups: Groups, stored: StoredCodes
) -> WidenedMatrix:
    block_format: BlockFormat = "q8_0" if num_bits == 8 else "q4_0"

    def steps() -> npt.NDArray[np.int32]:
        codes = stored.codes().astype(np.int32)
        codes -= stored.zeros().astype(np.int32)[:, groups]
        return codes

    def floats() -> FloatArray:
        weights = steps().astype(np.float32)
        # Infinite ones are refused when they are packed.
        with np.errstate(over="ignore"):
            weights *= _finite_scales(layer, stored)[:, groups]
        return weights

    def blocks() -> BlockMatrix:
        """Q8_0 of 8 bits, Q4_0 of fewer: an fp16 scale, then the steps."""
        halves = _finite_scales(layer, stored).astype("<f2")[:, groups[::_BLOCK]]
        own = steps().reshape(*halves.shape, _BLOCK)
        if num_bits == 8:
            raw = own.astype(np.int8).view(np.uint8)
        else:
            nibbles = (own + 8).astype(np.uint8)
            half = _BLOCK // 2
            raw = nibbles[..., :half] | nibbles[..., half:] << np.uint8(4)
        scales = halves[..., None].view(np.uint8)
        joined = np.concatenate([scales, raw], axis=-1).reshape(len(raw), -1)
        return BlockMatrix(block_format, layer.shape, joined)

    has_blocks = _has_blocks(layer, num_bits, groups, stored)
    return WidenedMatrix(layer.shape, floats, Blocks(block_format, blocks) if has_blocks else None)


def _has_blocks(layer: LayerTensors, num_bits: int, groups: Groups, stored: StoredCodes) -> bool:
    """Whether blocks of 32 neighbours stand for the same numbers."""
    if len(groups) % _BLOCK or not (groups.reshape(-1, _BLOCK) == groups[::_BLOCK, None]).all():
        return False
    if num_bits == 4 or (num_bits == 8 and (stored.zeros() != INT8_ZERO).any()):
        return False
    scales = _finite_scales(layer, stored)
    if np.abs(scales).max(initial=0) > _MOST_FP16:
        return False
    return bool((scales.astype(np.float16).astype(np.float32) == scales).all())


def _in_fp16(layer: LayerTensors, stored: StoredCodes) -> FloatArray:
    """Scales as fp16 holds them. That rounds fp32 by 2^-11 at most, bf16 below 2^-17 alone."""
    exact = _finite_scales(layer, stored)
    if np.abs(exact).max() > _MOST_FP16:
        raise layer.error(
            stored.scales_suffix, f"holds a scale over {_MOST_FP16}, the most that can be kept"
        )
    kept = exact.astype(np.float16).astype(np.float32)
    change = np.abs(kept - exact)
    if change.any():
        is_changed = change > 0
        layer.note_rounding(float((change[is_changed] / np.abs(exact[is_changed])).max()))
    return kept


def _finite_scales(layer: LayerTensors, stored: StoredCodes) -> FloatArray:
    scales = stored.scales()
    if not np.isfinite(scales).all():
        raise layer.error(stored.scales_suffix, "holds a scale that isn't finite; it is damaged")
    return scales
