"""EXL2's layout (TGI's sources, EXL2): 2 to 8 bits, mixed within a layer by groups.

weight[k, n] = (q[p, n] - 2^(bits - 1)) scale[g(p), n] of the packed row p = q_invperm[k], where a
group's scale is (index + 1)^2 q_scale_max / 256 in fp16. A group's rows are one stream of bits down
the words of a column. No product takes such codes: weights are widened.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray
from lmi_core.weights.hf_config import QuantizationSettings
from lmi_core.weights.quantized.layout import LayerTensors, Part, Shape, WidenedMatrix
from lmi_core.weights.quantized.words import unpack_rows

_WIDTHS = (2, 3, 4, 5, 6, 8)
_PADDED = 32
"""Outputs are padded to a multiple of."""
_PER_WORD = 8
Rows = npt.NDArray[np.generic]


class Exl2:
    marks = ("q_weight",)
    ignored = ("q_perm", "q_tensors")

    def __init__(self, settings: QuantizationSettings) -> None:
        pass

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        _, num_inputs = shape
        return (
            Part("q_weight", ("I32",), None),
            Part("q_invperm", ("I32", "I16"), (num_inputs,)),
            Part("q_scale", ("I32",), None),
            Part("q_scale_max", ("F16",), None),
            Part("q_groups", ("I16",), None),
        )

    def matrix(self, layer: LayerTensors) -> WidenedMatrix:
        num_outputs, num_inputs = layer.shape
        groups = _groups(layer)
        places = layer.integers(layer["q_invperm"]).astype(np.int64) & 0xFFFF
        if not np.array_equal(np.sort(places), np.arange(num_inputs)):
            raise layer.error("q_invperm", f"isn't an order of {num_inputs} inputs; it is damaged")

        def unpack() -> FloatArray:
            words = np.ascontiguousarray(layer.integers(layer["q_weight"])).view(np.uint32)
            indices = unpack_rows(layer.integers(layer["q_scale"]), 4).astype(np.float16) + 1
            most = layer.floats(layer["q_scale_max"]).astype(np.float16) / np.float16(256)
            scales = (indices * indices * most[:, None]).astype(np.float32)
            if not np.isfinite(scales).all():
                raise layer.error("q_scale_max", "holds a scale that isn't finite; it is damaged")
            packed = np.empty((num_inputs, words.shape[1]), np.float32)
            first = 0
            for (bits, start, end), scale in zip(groups, scales, strict=True):
                last = min(first + (end - start) * 32 // bits, num_inputs)
                codes = _stream(words[start:end], bits, last - first)
                packed[first:last] = (codes - np.float32(1 << (bits - 1))) * scale
                first = last
            return np.ascontiguousarray(packed[places, :num_outputs].T)

        return WidenedMatrix(layer.shape, unpack)


def _groups(layer: LayerTensors) -> list[tuple[int, int, int]]:
    """Bits, first row of words and the one behind the last of each group; ModelError for groups
    that don't hold the layer's inputs, or tensors that don't go with them."""
    num_outputs, num_inputs = layer.shape
    columns = -(-num_outputs // _PADDED) * _PADDED
    shape = layer["q_weight"].shape
    if len(shape) != 2 or shape[1] != columns:
        raise layer.error("q_weight", f"is {list(shape)}, expected [any, {columns}]")
    pairs = layer.integers(layer["q_groups"]).astype(np.int64).ravel()
    if not len(pairs) or len(pairs) % 2:
        raise layer.error("q_groups", f"has {len(pairs)} numbers, which aren't pairs")
    widths, starts = pairs[::2], [int(start) & 0xFFFF for start in pairs[1::2]]
    ends = [*starts[1:], shape[0]]
    for suffix, expected in (
        ("q_scale", (len(starts), columns // _PER_WORD)),
        ("q_scale_max", (len(starts),)),
    ):
        if (found := layer[suffix].shape) != expected:
            raise layer.error(suffix, f"is {list(found)}, expected {list(expected)}")
    groups = list(zip(map(int, widths), starts, ends, strict=True))
    for bits, start, end in groups:
        if bits not in _WIDTHS or not 0 <= start < end <= shape[0]:
            raise layer.error(
                "q_groups", f"has a group of {bits} bits in rows {start} to {end} of {shape[0]}"
            )
    held = [(end - start) * 32 // bits for bits, start, end in groups]
    if starts[0] != 0 or sum(held[:-1]) >= num_inputs or sum(held) < num_inputs:
        raise layer.error("q_groups", f"holds {sum(held)} inputs, expected {num_inputs}")
    return groups


def _stream(words: npt.NDArray[np.uint32], bits: int, count: int) -> FloatArray:
    """The first ``count`` codes [count, columns] of words [rows, columns]."""
    at = np.arange(count) * bits
    word, shift = at >> 5, (at & 31).astype(np.uint64)[:, None]
    following = np.minimum(word + 1, len(words) - 1)
    pair = words[word].astype(np.uint64) | words[following].astype(np.uint64) << np.uint64(32)
    codes: FloatArray = (pair >> shift & np.uint64((1 << bits) - 1)).astype(np.float32)
    return codes
