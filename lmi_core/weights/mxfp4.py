"""Matrices of MXFP4: blocks of 32 floats of 4 bits (e2m1) with a power of two as their scale.

Format: OCP Microscaling Formats 1.0. A byte holds two neighbours, the first one in its lower half;
a scale is an exponent with bias 127, and 255 is NaN. bf16 holds every number exactly.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lmi_core.errors import ModelError
from lmi_core.weights.block_matrix import BlockMatrix

MXFP4_BLOCK = 32
MXFP4_ENDINGS = ("_blocks", "_scales")
"""Of the tensors that stand for one."""
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
E2M1_PAIRS = np.stack([_VALUES[np.arange(256) % 16], _VALUES[np.arange(256) // 16]], axis=1)
"""What a byte's two floats of 4 bits are."""
_NAN_SCALE = 255


def mx_scales(scales: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """What stored scales stand for, in their shape; NaN for NaN's."""
    is_nan = scales == _NAN_SCALE
    factors = np.ldexp(np.float32(1.0), np.where(is_nan, 0, scales.astype(np.int32) - 127))
    factors[is_nan] = np.nan
    return factors


def mxfp4_matrix(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> BlockMatrix:
    """The same numbers in GGUF's blocks: a scale, then bytes of inputs that are 16 apart.

    Takes what ``decode_mxfp4`` takes; raises ModelError for a scale that is NaN, which these can't
    be."""
    if (scales == _NAN_SCALE).any():
        raise ModelError(
            f"a scale of MXFP4 weights is {_NAN_SCALE}, which is NaN: the checkpoint is damaged",
            field="model",
        )
    codes = np.empty((*scales.shape, MXFP4_BLOCK), np.uint8)
    codes[..., ::2], codes[..., 1::2] = blocks & 15, blocks >> 4
    half = MXFP4_BLOCK // 2
    parts = [scales[..., None], codes[..., :half] | codes[..., half:] << 4]
    num_outputs, num_blocks = scales.shape
    raw = np.concatenate(parts, axis=-1).reshape(num_outputs, -1)
    return BlockMatrix("mxfp4", (num_outputs, num_blocks * MXFP4_BLOCK), raw)


def decode_mxfp4(
    blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint16]:
    """blocks [outputs, inputs / 32, 16] and scales [outputs, inputs / 32] -> bf16 [outputs,
    inputs]."""
    values = E2M1_PAIRS[blocks].reshape(*scales.shape, MXFP4_BLOCK) * mx_scales(scales)[..., None]
    bits = values.reshape(len(scales), -1).view(np.uint32) >> 16
    return bits.astype(np.uint16)
