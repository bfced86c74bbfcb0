"""GPTQ's layout (TGI format reference, GPTQ), in 4 and 8 bits.

weight[k, n] = scales[g, n] (q[k, n] - z[g, n]) of group g = g_idx[k]; qweight packs q along k,
qzeros packs z along n. As a rule qzeros holds z - 1 modulo 2^bits; ``gptq_v2`` holds z.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmi_core.weights.integer_matrix import IntegerMatrix
from lmi_core.weights.quantized.kept_codes import (
    NUM_BITS,
    StoredCodes,
    groups_in_order,
    keep_codes,
    stored_groups,
)
from lmi_core.weights.quantized.layout import FLOAT_DTYPES, LayerTensors, Part, Shape
from lmi_core.weights.quantized.settings import QuantizationSettings
from lmi_core.weights.quantized.words import unpack_columns, unpack_rows

_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""What zero points are more than what is stored."""
_OF_A_LAYER = frozenset({"bits", "group_size", "desc_act"})
_SKIPPED = "-:"


class Gptq:
    marks = ("qweight", "qzeros")
    ignored = ()

    def __init__(self, settings: QuantizationSettings) -> None:
        self._num_bits = settings.integer("bits", 4)
        if self._num_bits not in NUM_BITS:
            raise settings.error("bits", f"is {self._num_bits}; 4 and 8 can be read")
        version = settings.string("checkpoint_format", "gptq")
        if version not in _ZERO_OFFSETS:
            known = " and ".join(_ZERO_OFFSETS)
            raise settings.error("checkpoint_format", f"is {version!r}; {known} can be read")
        _check_dynamic(settings)
        self._zero_offset = _ZERO_OFFSETS[version]
        self._group_size = settings.group_size
        self._is_ordered = not settings.boolean("desc_act")

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        num_outputs, num_inputs = shape
        groups, bits = self._num_groups(num_inputs), self._num_bits
        return (
            Part("qweight", ("I32",), (-(-num_inputs * bits // 32), num_outputs)),
            Part("qzeros", ("I32",), (groups, -(-num_outputs * bits // 32))),
            Part("scales", FLOAT_DTYPES, (groups, num_outputs)),
            Part("g_idx", ("I32",), (num_inputs,), is_needed=not self._is_ordered),
        )

    def matrix(self, layer: LayerTensors) -> IntegerMatrix:
        num_outputs, num_inputs = layer.shape
        origin = f"group_size {self._group_size or -1}"
        groups = groups_in_order(num_inputs, self._group_size)
        if layer.has("g_idx"):
            stored = stored_groups(layer, "g_idx", self._num_groups(num_inputs))
            if not np.array_equal(stored, groups):
                origin += " and g_idx (desc_act)"
            groups = stored

        def codes() -> npt.NDArray[np.uint8]:
            packed = unpack_columns(layer.integers(layer["qweight"]), self._num_bits)
            return np.ascontiguousarray(packed[:, :num_inputs])

        def zeros() -> npt.NDArray[np.generic]:
            packed = unpack_rows(layer.integers(layer["qzeros"]), self._num_bits)
            most = 2**self._num_bits - 1
            return (packed[:, :num_outputs].T + np.uint8(self._zero_offset)) & np.uint8(most)

        stored_codes = StoredCodes(
            codes, lambda: layer.floats(layer["scales"]).T, zeros, "scales", "qzeros"
        )
        return keep_codes(layer, self._num_bits, groups, stored_codes, origin)

    def _num_groups(self, num_inputs: int) -> int:
        return -(-num_inputs // (self._group_size or num_inputs))


def _check_dynamic(settings: QuantizationSettings) -> None:
    """Refuse layers with settings of their own, as GPTQModel writes them: patterns of names, each
    with settings, or with none for layers left in floats, which their tensors tell anyway."""
    rules = settings.values.get("dynamic")
    for pattern, own in (rules if isinstance(rules, dict) else {}).items():
        differs = sorted(_OF_A_LAYER & own.keys()) if isinstance(own, dict) else []
        if differs and not pattern.startswith(_SKIPPED):
            raise settings.error(
                "dynamic",
                f"gives the layers {pattern[:80]!r} {', '.join(differs)} of their own, which isn't "
                "read; give a checkpoint with the same settings for all layers",
            )
