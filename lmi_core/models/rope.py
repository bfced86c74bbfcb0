"""Rotary positions: from ``rope_scaling``, ``rope_parameters`` and their neighbours to a
``RopeSpec``, and from there to tables of cosines and sines.

A position's row depends on the position alone, never on the length of a sequence, so that the same
tokens always get the same rotation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from lmi_core.models.spec import RopeKind, RopeSpec
from lmi_core.weights.hf_config import HfConfig, positive_number

if TYPE_CHECKING:
    from lmi_core.settings.engine_config import EngineConfig

_OLD_KINDS = {"su": "longrope"}
KINDS: tuple[RopeKind, ...] = tuple(kind for kind in get_args(RopeKind) if kind != "none")
_ORIGINAL = "original_max_position_embeddings"
_UNSCALED = ("rope_theta", "partial_rotary_factor")
"""What may also stand beside the object of settings."""
_NAMES = frozenset(
    {
        *("rope_type", "type", "factor", _ORIGINAL, *_UNSCALED, "truncate"),
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
        *("mrope_section", "mrope_interleaved"),  # images have such places, texts don't
    }
)
"""What Transformers knows of rotary settings."""
_MAX_POSITIONS = 2**31 - 1
"""Positions are 32-bit numbers."""


def override_rope(config: HfConfig, asked: EngineConfig) -> HfConfig:
    """A checkpoint's configuration with the rotary settings of ``asked``, which has some; None
    leaves its own.

    As in text-generation-inference's launcher, a kind alone has the factor 1, and a factor alone
    is linear (TGI's launcher). Raises ModelError for an object that no checkpoint may have.
    """
    scaling, factor, theta = asked.rope_scaling, asked.rope_factor, asked.rope_theta
    config = replace(config, overridden=frozenset((*_KEYS, "rope_theta")))
    _, values = rope_values(config)
    replaced = {*_KEYS}
    if scaling is not None or factor is not None:
        # Those that are the model's, whatever scales them; without any, they are the family's.
        own = {name: values.get(name, config.get(name)) for name in _UNSCALED}
        if isinstance(scaling, dict):
            if (problem := objection_to(scaling)) is not None:
                raise config.error(_KEYS[0], problem)
            values = {**scaling, **({} if factor is None else {"factor": factor})}
            replaced |= {_ORIGINAL} & values.keys()
        else:
            values = {"rope_type": scaling or "linear", "factor": factor or 1.0}
        values = {k: v for k, v in own.items() if v is not None} | values
    if theta is not None:
        values = {**values, "rope_theta": theta}
    rest = {key: value for key, value in config.values.items() if key not in replaced}
    return replace(config, values={**rest, _KEYS[0]: values})


def objection_to(scaling: Mapping[str, Any]) -> str | None:
    """What speaks against an object that is asked for, whatever the model; None: nothing."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if not isinstance(kind, str) or _OLD_KINDS.get(kind, kind) not in KINDS:
        return f"has rope_type {kind!r:.40}; supported: {', '.join(KINDS)}"
    if "factor" in scaling and not scaling.keys() & {"rope_type", "type"}:
        return f"has a factor, but no rope_type, which is one of {', '.join(KINDS)}"
    if unknown := sorted(scaling.keys() - _NAMES):
        return f"has {unknown[0][:40]!r}; allowed are {', '.join(sorted(_NAMES))}"
    return None


def rope_spec(
    config: HfConfig,
    head_dim: int,
    max_positions: int,
    *,
    layer_type: str | None = None,
    partial_default: float = 1.0,
    theta_default: float = 10000.0,
) -> RopeSpec:
    """The rotary embedding of a model with ``max_positions`` = ``max_position_embeddings``.

    Both spellings are read: ``rope_theta`` beside ``rope_scaling`` (with ``type`` or
    ``rope_type``), and ``rope_parameters`` holding everything, for ``layer_type`` if it differs by
    them. ``partial_default`` is the share of a head that is rotated, where the file has none, and
    ``theta_default`` is theta.
    """
    key, values = rope_values(config, layer_type)
    kind = values.get("rope_type", values.get("type", "default"))
    kind = _OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in KINDS:
        raise config.error(key, f"has rope_type {kind!r}; supported: {', '.join(KINDS)}")
    if head_dim % 2 != 0 or head_dim < 4:
        raise config.error("head_dim", f"is {head_dim}, but must be even and at least 4")
    spec = _Reader(config, key, values)
    theta, rotary_dim = _theta(spec, theta_default), _rotary_dim(spec, head_dim, partial_default)
    original = _original_max_positions(spec, max_positions)
    factor = _factor(spec, kind, max_positions, original)
    short_factors, long_factors = (
        _factors(spec, name, rotary_dim // 2) if kind == "longrope" else ()
        for name in ("short_factor", "long_factor")
    )
    rope = RopeSpec(
        rotary_dim=rotary_dim,
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_positions=max_positions if kind == "dynamic" else original,
        attention_factor=_attention_factor(spec, kind, factor, original),
        beta_fast=spec.number("beta_fast", 32.0),
        beta_slow=spec.number("beta_slow", 1.0),
        truncate=bool(spec.values.get("truncate", True)),
        low_freq_factor=spec.number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=spec.number("high_freq_factor", None if kind == "llama3" else 4.0),
        short_factors=short_factors,
        long_factors=long_factors,
    )
    _check(rope, config, key, max_positions)
    return rope


def _check(rope: RopeSpec, config: HfConfig, key: str, max_positions: int) -> None:
    if max(max_positions, rope.original_max_positions) * rope.factor > _MAX_POSITIONS:
        raise config.error(
            f"{key}.factor",
            f"is {rope.factor}, which makes more than {_MAX_POSITIONS} positions of "
            f"{max(max_positions, rope.original_max_positions)}; give a smaller one",
        )
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise config.error(
            f"{key}.high_freq_factor",
            f"is {rope.high_freq_factor}, but must be above low_freq_factor {rope.low_freq_factor}",
        )


def scaled_max_positions(rope: RopeSpec, max_positions: int) -> int:
    """Longest context with scaling: linear and dynamic stretch ``max_position_embeddings``, yarn
    the positions it was trained on before; llama3 models state the stretched length."""
    if rope.kind in ("linear", "dynamic"):
        return int(max_positions * rope.factor)
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_max_positions * rope.factor))
    return max_positions


class _Reader:
    def __init__(self, config: HfConfig, key: str, values: dict[str, Any]) -> None:
        self.config = config
        self.key = key
        self.values = values

    def number(self, name: str, default: float | None) -> float:
        key, value = f"{self.key}.{name}", self.values.get(name)
        if name in _UNSCALED:
            key, beside = name, self.config.get(name)
            value = beside if value is None else value
        return positive_number(self.config, key, default if value is None else value)


_KEYS = ("rope_scaling", "rope_parameters")


def rope_values(config: HfConfig, layer_type: str | None = None) -> tuple[str, dict[str, Any]]:
    """The key under which a configuration has its rotary settings, for layers of a type where they
    differ, and these."""
    for key in _KEYS:
        values = config.values.get(key)
        if values is None or values == {}:
            continue
        if not isinstance(values, dict):
            raise config.error(key, f"is {values!r}, but must be an object or null")
        if any(isinstance(value, dict) for value in values.values()):
            if layer_type is None:
                raise config.error(key, "differs by layer type, which is not supported here")
            values = values.get(layer_type)
            if not isinstance(values, dict):
                raise config.error(key, f"has no object for layers of {layer_type}")
        return key, values
    return "rope_parameters", {}


def _theta(spec: _Reader, default: float) -> float:
    theta = spec.number("rope_theta", default)
    if theta <= 1.0:
        raise spec.config.error("rope_theta", f"is {theta}, but must be above 1")
    return theta


def _original_max_positions(spec: _Reader, max_positions: int) -> int:
    if spec.config.values.get(_ORIGINAL) is not None:
        return spec.config.integer(_ORIGINAL)
    positions = int(spec.number(_ORIGINAL, float(max_positions)))
    if positions < 1:
        raise spec.config.error(f"{spec.key}.{_ORIGINAL}", "is below 1")
    return positions


def _factor(spec: _Reader, kind: str, max_positions: int, original: int) -> float:
    if kind == "default":
        return 1.0
    has_lengths = kind in ("yarn", "longrope")
    factor = spec.number("factor", max_positions / original if has_lengths else None)
    if factor < 1.0:
        raise spec.config.error(f"{spec.key}.factor", f"is {factor}, but must be at least 1")
    return factor


def _attention_factor(spec: _Reader, kind: str, factor: float, original: int) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    if spec.values.get("attention_factor") is not None:
        return spec.number("attention_factor", None)
    if kind == "longrope":
        return 1.0 if factor <= 1.0 else _longrope_attention_factor(spec, factor, original)
    if spec.values.get("mscale") and spec.values.get("mscale_all_dim"):
        mscale, mscale_all_dim = spec.number("mscale", None), spec.number("mscale_all_dim", None)
        return _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return _yarn_mscale(factor, 1.0)


def _longrope_attention_factor(spec: _Reader, factor: float, original: int) -> float:
    if original < 2:
        raise spec.config.error(_ORIGINAL, f"is {original}, but must be at least 2")
    return math.sqrt(1 + math.log(factor) / math.log(original))


def _rotary_dim(spec: _Reader, head_dim: int, partial_default: float) -> int:
    partial = spec.number("partial_rotary_factor", partial_default)
    rotary_dim = int(head_dim * partial)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2 != 0:
        raise spec.config.error(
            "partial_rotary_factor",
            f"is {partial:g}, which makes {rotary_dim} of {head_dim} dimensions; it must be an "
            "even number of them",
        )
    return rotary_dim


def _factors(spec: _Reader, name: str, count: int) -> tuple[float, ...]:
    values = spec.values.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise spec.config.error(f"{spec.key}.{name}", f"must list {count} numbers above 0")
    key = f"{spec.key}.{name}"
    return tuple(positive_number(spec.config, key, value) for value in values)


def yarn_score_scale(config: HfConfig, rope: RopeSpec) -> float:
    """What attention scores are multiplied by besides, where the settings of DeepSeek's models say
    so."""
    key, values = rope_values(config)
    if rope.kind == "default" or not values.get("mscale_all_dim"):
        return 1.0
    all_dim = _Reader(config, key, values).number("mscale_all_dim", None)
    return _yarn_mscale(rope.factor, all_dim) ** 2


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def rope_tables(
    rope: RopeSpec, num_positions: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """cos and sin of positions 0 to num_positions - 1, each [num_positions, rotary_dim / 2].

    Angles are float32 products, as the models were trained with.
    """
    if rope.kind == "none":
        shape = num_positions, rope.rotary_dim // 2
        return np.ones(shape, np.float32), np.zeros(shape, np.float32)
    positions = np.arange(num_positions, dtype=np.float32)
    angles = np.outer(positions, inverse_frequencies(rope, num_positions)).astype(np.float64)
    cos = (np.cos(angles) * rope.attention_factor).astype(np.float32)
    sin = (np.sin(angles) * rope.attention_factor).astype(np.float32)
    return cos, sin


def inverse_frequencies(rope: RopeSpec, num_positions: int) -> npt.NDArray[np.float32]:
    """Radians per position of each rotated pair, [rotary_dim / 2].

    ``dynamic`` is evaluated once, for a context of ``num_positions``: up to the model's original
    length nothing is scaled, beyond it every position uses the frequencies of the longest context
    served (NTK-aware scaling, with the length fixed). ``longrope``, too, has its factors of long
    contexts where longer ones than the original are served, and else those of short ones.
    """
    theta = rope.theta
    if rope.kind == "dynamic":
        theta = _dynamic_theta(rope, num_positions)
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    frequencies = theta**-exponents
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "yarn":
        frequencies = _yarn(rope, frequencies)
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "longrope":
        is_long = num_positions > rope.original_max_positions
        frequencies = frequencies / np.array(rope.long_factors if is_long else rope.short_factors)
    return frequencies.astype(np.float32)


def _dynamic_theta(rope: RopeSpec, num_positions: int) -> float:
    stretch = max(num_positions, rope.original_max_positions) / rope.original_max_positions
    scale = rope.factor * stretch - (rope.factor - 1.0)
    return float(rope.theta * scale ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _yarn(rope: RopeSpec, frequencies: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Blend of kept (fast) and interpolated (slow) frequencies, arXiv 2309.00071 section 3.2."""

    def pair_of(num_rotations: float) -> float:
        ratio = rope.original_max_positions / (num_rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001
    pairs = np.arange(rope.rotary_dim // 2, dtype=np.float64)
    interpolated = np.clip((pairs - low) / width, 0.0, 1.0)
    return frequencies / rope.factor * interpolated + frequencies * (1.0 - interpolated)


def _llama3(rope: RopeSpec, frequencies: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Long waves interpolated, short ones kept, a linear blend between (Llama 3.1's scheme)."""
    rotations = rope.original_max_positions * frequencies / (2 * math.pi)
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = np.clip(blend, 0.0, 1.0)
    return frequencies / rope.factor * (1.0 - kept) + frequencies * kept
