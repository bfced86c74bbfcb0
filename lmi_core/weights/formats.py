"""The words for how weights are stored and packed, and the arrays that hold them."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
WeightFormat = Literal["fp32", "bf16"]
Quantization = Literal["int8", "int4", "fp8", "nf4", "fp4", "llm_int8", "eetq", "smoothquant"]
"""What matrices are made of at load, or kept in."""
RowRounding = Literal["int8", "outliers", "none", "llm_int8"]
"""Of the rows that a quantised matrix is multiplied with: each to int8 by a scale of its own; so,
but for a row's few largest numbers, which get 16 bits; not at all; or to int8 but for numbers from
LLM.int8's threshold on (csrc/cpu/packed_linear.h)."""
NativeFloatCodes = Literal["nf4", "fp4", "e4m3", "e5m2"]
"""Codes of floats, which the CPU keeps as they are (csrc/cpu/float_codes.h)."""
BlockFormat = Literal[
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl",
    "iq4_xs", "mxfp4",
]  # fmt: skip
"""GGUF's types of blocks, kept as they are."""
BLOCK_FORMATS: tuple[BlockFormat, ...] = get_args(BlockFormat)
PackFormat = Literal["fp32", "bf16", "fp16", "int8", "int4", "fp8"] | BlockFormat | NativeFloatCodes
"""int8: a scale per output; int4: a scale per output and 128 inputs, or as in the checkpoint; fp8:
as in the checkpoint, or a scale per output."""
