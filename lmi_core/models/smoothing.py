"""What inputs of quantised linears are divided by, so that no channel needs a scale for all.

SmoothQuant (arXiv 2211.10438): a linear's inputs are divided by factors and its columns are
multiplied by them, which changes nothing but what is rounded. A factor is the largest magnitude of
an input to the power of alpha over that of its column to the power of 1 - alpha, here rounded to a
power of two, so that moving it rounds no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lmi_core.models.spec import DecoderSpec, LayerLinear
from lmi_core.models.weights import Norm
from lmi_core.weights.formats import FloatArray

_MOST_POWER = 40
LinearPeaks = Mapping[LayerLinear, FloatArray]
"""[2, inputs] of each linear: the largest magnitudes of its inputs, and of its weights."""


@dataclass(frozen=True, slots=True)
class LayerFactors:
    """Of a layer; a linear that isn't named stays as it is."""

    columns: Mapping[LayerLinear, FloatArray] = field(default_factory=dict)
    """What inputs are divided by before they arrive."""
    rows: Mapping[LayerLinear, FloatArray] = field(default_factory=dict)
    """What outputs are divided by, for the linear that reads them."""


Share = Callable[[FloatArray], FloatArray]
"""Makes numbers of inputs [..., inputs] alike where they must have one factor."""
Choose = Callable[[tuple[LayerLinear, ...], Share], FloatArray | None]
"""The factors [inputs] of linears that read the same; None: they stay as they are."""


def layer_factors(
    spec: DecoderSpec, layer_id: int, choose: Choose, *, keeps_values: bool = False
) -> LayerFactors:
    """``choose`` is asked where something linear makes what is read, which takes the division: a
    norm's weight, the rows of values or of up. What an activation or the residual stream gives
    stays as it is. ``keeps_values``: so do values, for which the cache has scales of its own."""
    columns: dict[LayerLinear, FloatArray] = {}
    rows: dict[LayerLinear, FloatArray] = {}
    for linears in _normed_linears(spec, layer_id):
        if (factors := choose(linears, lambda numbers: numbers)) is not None:
            columns |= dict.fromkeys(linears, factors)
    if _scales_up(spec):
        down = choose((LayerLinear.DOWN,), lambda numbers: numbers)
        if down is not None:
            columns[LayerLinear.DOWN] = down
            rows[LayerLinear.GATE_UP] = np.concatenate([np.ones_like(down), down])
    attention = spec.attention
    if attention.latent is None and not keeps_values:
        output = choose((LayerLinear.ATTENTION_OUTPUT,), partial(_shared_by_heads, spec))
        if output is not None:
            columns[LayerLinear.ATTENTION_OUTPUT] = output
            values = output.reshape(attention.num_kv_heads, -1, attention.head_dim)[:, 0]
            others = np.ones(attention.q_size + attention.kv_size, np.float32)
            rows[LayerLinear.QKV] = np.concatenate([others, values.ravel()])
    return LayerFactors(columns, rows)


@dataclass(frozen=True, slots=True)
class Smoothing:
    """What a calibration saw of every layer, and how far it moves the burden to the weights."""

    layers: tuple[LinearPeaks, ...]
    alpha: float
    """0: all of it stays with the inputs; 1: the weights get it."""

    def factors(self, spec: DecoderSpec, layer_id: int, *, keeps_values: bool) -> LayerFactors:
        """``keeps_values``: as in ``layer_factors``."""
        peaks = self.layers[layer_id]

        def choose(linears: tuple[LayerLinear, ...], share: Share) -> FloatArray | None:
            read = [peaks[linear] for linear in linears if linear in peaks]
            return self._factors(share(np.maximum.reduce(read))) if read else None

        return layer_factors(spec, layer_id, choose, keeps_values=keeps_values)

    def _factors(self, peaks: FloatArray) -> FloatArray:
        """Powers of two; 1 for an input that is always 0, or that no weight reads."""
        inputs, weights = peaks.astype(np.float64)
        is_used = (inputs > 0) & (weights > 0) & np.isfinite(inputs) & np.isfinite(weights)
        inputs, weights = (np.where(is_used, values, 1.0) for values in (inputs, weights))
        powers = self.alpha * np.log2(inputs) - (1 - self.alpha) * np.log2(weights)
        powers = np.rint(np.clip(powers, -_MOST_POWER, _MOST_POWER))
        return np.where(is_used, np.exp2(powers), 1.0).astype(np.float32)


def divided(norm: Norm, factors: FloatArray) -> Norm:
    """``norm`` with what it gives divided by ``factors`` [columns]."""
    ones = np.ones_like(factors)
    weight = (ones if norm.weight is None else norm.weight) / factors
    return Norm(weight, None if norm.bias is None else norm.bias / factors)


def _normed_linears(spec: DecoderSpec, layer_id: int) -> list[tuple[LayerLinear, ...]]:
    """Linears that read nothing but one norm, together with all that do."""
    names = spec.names
    is_sparse = spec.experts is not None and spec.experts.sparse[layer_id]
    has_first = bool(names.attention_norm) and (layer_id > 0 or not spec.first_layer_normed)
    if spec.norms_stream:
        return []
    groups: list[tuple[LayerLinear, ...]] = []
    reads_alone = spec.attention.latent is None and has_first
    if spec.parallel and not names.mlp_norm:
        both = (LayerLinear.QKV, LayerLinear.GATE_UP)
        return [both] if reads_alone and not is_sparse else []
    if reads_alone:
        groups.append((LayerLinear.QKV,))
    if names.mlp_norm and not is_sparse:
        groups.append((LayerLinear.GATE_UP,))
    return groups


def _scales_up(spec: DecoderSpec) -> bool:
    """Whether what down reads is proportional to up."""
    return spec.gated and spec.activation != "clamped_swiglu"


def _shared_by_heads(spec: DecoderSpec, numbers: FloatArray) -> FloatArray:
    """Of inputs of the attention's output, the most of the query heads that share a value head."""
    attention = spec.attention
    grouped = numbers.reshape(*numbers.shape[:-1], attention.num_kv_heads, -1, attention.head_dim)
    most = grouped.max(axis=-2, keepdims=True)
    return np.broadcast_to(most, grouped.shape).reshape(numbers.shape)
