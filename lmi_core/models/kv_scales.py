"""Scales of an fp8 KV cache in a checkpoint (TGI's sources, "fp8")."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path

from lmi_core.errors import ModelError
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.formats import FloatArray

LayerScales = tuple[float, float]
"""Of keys and of values: what codes are multiples of."""

_PAIRS = (("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"))
"""Of keys and of values; the latter is how ModelOpt and older tools spell them."""
_BOTH = "kv_scale"
KV_SCALE_ENDINGS = ("k_scale", "v_scale")
"""Of the names of all of these."""


def kv_scale_names(
    spec: DecoderSpec, names: WeightNames, tensors: Collection[str]
) -> tuple[str, ...]:
    """The tensors among ``tensors`` that are such scales."""
    prefixes = [_prefix(names, layer) for layer in range(spec.num_layers)]
    spellings = (*(name for pair in _PAIRS for name in pair), _BOTH)
    possible = (prefix + name for prefix in prefixes for name in spellings)
    return tuple(name for name in possible if name in tensors)


def read_kv_scales(
    path: Path,
    spec: DecoderSpec,
    found: Collection[str],
    read: Callable[[str], FloatArray],
) -> tuple[LayerScales, ...]:
    """Each layer's; 1 where it has none.

    Raises ModelError for a scale that isn't one positive number.
    """

    def scale(name: str) -> float:
        values = read(name).reshape(-1)
        if values.size != 1 or not (math.isfinite(values[0]) and values[0] > 0):
            shown = values.tolist() if values.size < 5 else f"{values.size} numbers"
            raise ModelError(
                f"{path}: {name} is {shown}; it must be one positive number", field="model"
            )
        return float(values[0])

    scales = {name: scale(name) for name in found}

    def of_layer(prefix: str) -> LayerScales:
        for keys, values in _PAIRS:
            if prefix + keys in scales and prefix + values in scales:
                return scales[prefix + keys], scales[prefix + values]
        both = scales.get(prefix + _BOTH, 1.0)
        return both, both

    return tuple(of_layer(_prefix(spec.names, layer)) for layer in range(spec.num_layers))


def _prefix(names: WeightNames, layer: int) -> str:
    """Of the names beside the layer's key projection."""
    return names.layer.format(layer=layer) + names.k.rpartition(".")[0] + "."
