"""The words for how weights are stored and packed, and the arrays that hold them."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
WeightFormat = Literal["fp32", "bf16"]
Quantization = Literal["int8", "int4", "fp8"]
PackFormat = Literal["fp32", "bf16", "int8", "int4", "fp8"]
"""int8: a scale per output; int4: a scale per output and 128 inputs, or as in the checkpoint; fp8:
as in the checkpoint, or a scale per output."""
