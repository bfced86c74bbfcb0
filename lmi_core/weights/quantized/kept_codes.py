"""A layer's codes and scales as the engine keeps them: to the bit, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray
from lmi_core.weights.integer_matrix import INT8_ZERO, Codes, IntegerMatrix
from lmi_core.weights.quantized.layout import LayerTensors

NUM_BITS = (4, 8)
_GROUP_SIZES = (128, 64, 32)
_MOST_FP16 = 65504
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
    zeros_suffix: str


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
    layer: LayerTensors, num_bits: int, groups: Groups, stored: StoredCodes, origin: str
) -> IntegerMatrix:
    """The layer in int4 or int8; ``origin`` says where ``groups`` come from, for errors.

    Raises ModelError if scales or zero points can't be kept.
    """
    if num_bits == 8:
        return _keep_int8(layer, groups, stored, origin)
    group_size = _kept_group_size(groups)
    if group_size is None:
        sizes = ", ".join(map(str, sorted(_GROUP_SIZES)))
        raise layer.error(
            stored.scales_suffix,
            f"has scales that can't be kept, because of {origin}: inputs that share one must be "
            f"neighbours, in groups of {sizes} or multiples; give a checkpoint with such groups "
            "or the unquantised one",
        )
    chosen = groups[::group_size]

    def unpack() -> Codes:
        scales = _in_fp16(layer, stored)[:, chosen]
        return Codes(stored.codes(), scales, stored.zeros()[:, chosen].astype(np.float32))

    return IntegerMatrix("int4", layer.shape, group_size, unpack)


def _kept_group_size(groups: Groups) -> int | None:
    """The most neighbours that always share a scale, of the sizes that there are."""
    for size in _GROUP_SIZES:
        firsts = np.repeat(groups[::size], size)[: len(groups)]
        if np.array_equal(firsts, groups):
            return size
    return None


def _keep_int8(
    layer: LayerTensors, groups: Groups, stored: StoredCodes, origin: str
) -> IntegerMatrix:
    if (groups != groups[0]).any():
        raise layer.error(
            stored.scales_suffix,
            f"has several 8-bit scales per output ({origin}); int8 weights are kept with one: give "
            "a checkpoint with group_size -1, one in 4 bits, or the unquantised one",
        )

    zeros = stored.zeros()[:, groups[:1]].astype(np.float32)
    if (zeros != INT8_ZERO).any():
        raise layer.error(
            stored.zeros_suffix,
            "has zero points; int8 weights are kept without: give a symmetric checkpoint, one in 4 "
            "bits, or the unquantised one",
        )

    def unpack() -> Codes:
        scales = _finite_scales(layer, stored)
        return Codes(stored.codes(), scales[:, groups[:1]], zeros)

    return IntegerMatrix("int8", layer.shape, 0, unpack)


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
