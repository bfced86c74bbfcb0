"""GPTQ's layout (TGI's sources, GPTQ), in 2, 3, 4 and 8 bits.

weight[k, n] = scales[g, n] (q[k, n] - z[g, n]) of group g = g_idx[k]; qweight packs q along k,
qzeros packs z along n. As a rule qzeros holds z - 1 modulo 2^bits; ``gptq_v2`` holds z.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lmi_core.weights.hf_config import QuantizationSettings
from lmi_core.weights.integer_matrix import IntegerMatrix
from lmi_core.weights.quantized.kept_codes import (
    StoredCodes,
    groups_in_order,
    keep_codes,
    stored_groups,
)
from lmi_core.weights.quantized.layout import (
    FLOAT_DTYPES,
    LayerTensors,
    Layout,
    Part,
    Shape,
    WidenedMatrix,
)
from lmi_core.weights.quantized.marlin import Marlin
from lmi_core.weights.quantized.methods import MARLIN
from lmi_core.weights.quantized.words import unpack_columns, unpack_rows

_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""What zero points are more than what is stored."""
_ALL_BITS = (2, 3, 4, 8)
_SKIPPED, _MATCHED = "-:", "+:"


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Of a layer's codes."""

    num_bits: int
    group_size: int | None
    is_ordered: bool

    @classmethod
    def of(cls, settings: QuantizationSettings) -> _Scheme:
        num_bits = settings.integer("bits", 4)
        if num_bits not in _ALL_BITS:
            known = ", ".join(map(str, _ALL_BITS))
            raise settings.error("bits", f"is {num_bits}; {known} can be read")
        return cls(num_bits, settings.group_size, not settings.boolean("desc_act"))

    def num_groups(self, num_inputs: int) -> int:
        return -(-num_inputs // (self.group_size or num_inputs))


def gptq_layout(settings: QuantizationSettings) -> Layout:
    """The one that ``settings`` name. Raises ModelError for others than there are."""
    is_marlin = settings.boolean("is_marlin_format")
    if is_marlin or settings.values.get("checkpoint_format") == MARLIN:
        return Marlin(settings, codes="B", scales="s")
    return Gptq(settings)


class Gptq:
    marks = ("qweight", "qzeros")
    ignored = ()

    def __init__(self, settings: QuantizationSettings) -> None:
        self._scheme = _Scheme.of(settings)
        version = settings.string("checkpoint_format", "gptq")
        if version not in _ZERO_OFFSETS:
            known = ", ".join((*_ZERO_OFFSETS, MARLIN))
            raise settings.error("checkpoint_format", f"is {version!r}; {known} can be read")
        self._own = _own_schemes(settings)
        self._zero_offset = _ZERO_OFFSETS[version]

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        num_outputs, num_inputs = shape
        scheme = self._scheme_of(name)
        groups, bits = scheme.num_groups(num_inputs), scheme.num_bits
        return (
            Part("qweight", ("I32",), (-(-num_inputs * bits // 32), num_outputs)),
            Part("qzeros", ("I32",), (groups, -(-num_outputs * bits // 32))),
            Part("scales", FLOAT_DTYPES, (groups, num_outputs)),
            Part("g_idx", ("I32",), (num_inputs,), is_needed=not scheme.is_ordered),
        )

    def matrix(self, layer: LayerTensors) -> IntegerMatrix | WidenedMatrix:
        num_outputs, num_inputs = layer.shape
        scheme = self._scheme_of(layer.name)
        groups = groups_in_order(num_inputs, scheme.group_size)
        if layer.has("g_idx"):
            groups = stored_groups(layer, "g_idx", scheme.num_groups(num_inputs))

        def codes() -> npt.NDArray[np.uint8]:
            packed = unpack_columns(layer.integers(layer["qweight"]), scheme.num_bits)
            return np.ascontiguousarray(packed[:, :num_inputs])

        def zeros() -> npt.NDArray[np.generic]:
            packed = unpack_rows(layer.integers(layer["qzeros"]), scheme.num_bits)
            most = 2**scheme.num_bits - 1
            return (packed[:, :num_outputs].T + np.uint8(self._zero_offset)) & np.uint8(most)

        stored_codes = StoredCodes(codes, lambda: layer.floats(layer["scales"]).T, zeros, "scales")
        return keep_codes(layer, scheme.num_bits, groups, stored_codes)

    def _scheme_of(self, name: str) -> _Scheme:
        found = (own for pattern, own in self._own if pattern.match(name))
        return next(found, self._scheme)


def _own_schemes(settings: QuantizationSettings) -> list[tuple[re.Pattern[str], _Scheme]]:
    """Layers with settings of their own, as GPTQModel writes them: patterns of names, each with
    settings, or with none for layers left in floats, which their tensors tell anyway."""
    rules = settings.values.get("dynamic")
    schemes = []
    for pattern, own in (rules if isinstance(rules, dict) else {}).items():
        if pattern.startswith(_SKIPPED) or not isinstance(own, dict):
            continue
        where = f"dynamic[{pattern[:80]!r}]"
        try:
            compiled = re.compile(pattern.removeprefix(_MATCHED))
        except re.error as error:
            raise settings.error(where, f"isn't a pattern: {error}") from None
        values = {**settings.values, **own}
        prefix = f"{settings.prefix}{where}."
        schemes.append(
            (compiled, _Scheme.of(QuantizationSettings(settings.path, values, prefix=prefix)))
        )
    return schemes
