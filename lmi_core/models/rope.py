"""Tables of cosines and sines of rotary positions.

A position's row depends on the position alone, never on the length of a sequence, so that the same
tokens always get the same rotation.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lmi_core.models.spec import RopeSpec


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
