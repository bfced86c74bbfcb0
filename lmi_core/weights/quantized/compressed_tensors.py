"""The integer layouts of compressed-tensors (TGI's sources, compressed-tensors).

weight[n, k] = weight_scale[n, g] (q[n, k] - z[n, g]). ``int-quantized`` has q and z as they are, in
int8; ``pack-quantized`` has them with 2^(bits - 1) added, in words along k and along n; so
codes are kept. Activations of schemes that round them to int8, for rows or for all, get a scale per
row; others what weights in integers get otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from lmi_core.weights.formats import FloatArray, RowRounding
from lmi_core.weights.hf_config import QuantizationSettings
from lmi_core.weights.integer_matrix import IntegerMatrix
from lmi_core.weights.quantized.kept_codes import (
    Groups,
    StoredCodes,
    groups_in_order,
    keep_codes,
    stored_groups,
)
from lmi_core.weights.quantized.layout import (
    FLOAT_DTYPES,
    LayerTensors,
    Part,
    Shape,
    WidenedMatrix,
)
from lmi_core.weights.quantized.weight_scheme import PACKED, WeightScheme, read_schemes, scheme_of
from lmi_core.weights.quantized.words import unpack_columns, unpack_rows


class CompressedTensors:
    marks = ("weight_packed", "weight")
    ignored = ("input_scale", "input_zero_point")

    def __init__(self, settings: QuantizationSettings) -> None:
        self._schemes = read_schemes(settings)
        transforms = settings.values.get("transform_config")
        if isinstance(transforms, dict) and transforms.get("config_groups"):
            raise settings.error(
                "transform_config", "has transforms of activations, which can't be computed"
            )

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        scheme = scheme_of(self._schemes, name)
        num_outputs, num_inputs = shape
        num_groups = _num_groups(scheme, num_inputs)
        scales = (1,) if scheme.is_per_tensor else (num_outputs, num_groups)
        scale = Part("weight_scale", FLOAT_DTYPES, scales)
        zero_suffix = "weight_zero_point"
        if scheme.format != PACKED:
            zeros = Part(zero_suffix, ("I8",), scales, is_needed=False)
            return Part("weight", ("I8",), shape), scale, zeros
        bits = scheme.num_bits
        words = (-(-num_outputs * bits // 32), num_groups)
        return (
            Part("weight_packed", ("I32",), (num_outputs, -(-num_inputs * bits // 32))),
            scale,
            Part(zero_suffix, ("I32",), words, is_needed=not scheme.is_symmetric),
            Part("weight_shape", ("I64", "I32"), (2,), is_needed=False),
            Part("weight_g_idx", ("I32",), (num_inputs,), is_needed=not scheme.is_ordered),
        )

    def matrix(self, layer: LayerTensors) -> IntegerMatrix | WidenedMatrix:
        scheme = scheme_of(self._schemes, layer.name)
        num_outputs, num_inputs = layer.shape
        _check_shape(layer)

        of_groups = (num_outputs, _num_groups(scheme, num_inputs))

        def scales() -> FloatArray:
            values = layer.floats(layer["weight_scale"])
            return np.broadcast_to(values, of_groups) if scheme.is_per_tensor else values

        def codes() -> npt.NDArray[np.uint8]:
            if scheme.format != PACKED:
                return _from_signed(layer, scheme.num_bits)
            packed = unpack_rows(layer.integers(layer["weight_packed"]), scheme.num_bits)
            return np.ascontiguousarray(packed[:, :num_inputs])

        def zeros() -> npt.NDArray[np.generic]:
            middle = 2 ** (scheme.num_bits - 1)
            if not layer.has("weight_zero_point"):
                return np.full_like(scales(), middle)
            stored = layer.integers(layer["weight_zero_point"])
            if scheme.format != PACKED:
                signed = np.broadcast_to(stored, of_groups) if scheme.is_per_tensor else stored
                return signed.astype(np.float32) + np.float32(middle)
            return unpack_columns(stored, scheme.num_bits).T[:num_outputs]

        stored = StoredCodes(codes, scales, zeros, "weight_scale")
        matrix = keep_codes(layer, scheme.num_bits, _groups(scheme, layer), stored)
        rounding: RowRounding | None = "int8" if scheme.has_int8_rows else None
        if isinstance(matrix, IntegerMatrix):
            return replace(matrix, rounding=rounding)
        if matrix.ordered is None:
            return matrix
        return replace(matrix, ordered=replace(matrix.ordered, rounding=rounding))


def _from_signed(layer: LayerTensors, num_bits: int) -> npt.NDArray[np.uint8]:
    """Codes of whole numbers around zero; ModelError for numbers that ``num_bits`` can't hold."""
    middle = 2 ** (num_bits - 1)
    codes = layer.integers(layer["weight"]).view(np.uint8) + np.uint8(middle)
    if codes.max(initial=0) >= 2 * middle:
        raise layer.error(
            "weight", f"holds numbers outside {-middle} to {middle - 1}; it is damaged"
        )
    return codes


def _num_groups(scheme: WeightScheme, num_inputs: int) -> int:
    return -(-num_inputs // (scheme.group_size or num_inputs))


def _groups(scheme: WeightScheme, layer: LayerTensors) -> Groups:
    """The group of every input."""
    num_inputs = layer.shape[1]
    if not layer.has("weight_g_idx"):
        return groups_in_order(num_inputs, scheme.group_size)
    return stored_groups(layer, "weight_g_idx", _num_groups(scheme, num_inputs))


def _check_shape(layer: LayerTensors) -> None:
    if not layer.has("weight_shape"):
        return
    stored = layer.integers(layer["weight_shape"])
    if tuple(stored) != layer.shape:
        raise layer.error("weight_shape", f"is {stored.tolist()}, expected {list(layer.shape)}")
