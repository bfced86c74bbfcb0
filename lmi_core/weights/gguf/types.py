"""GGUF's types of tensors: what a block of neighbouring weights has in the file.

Format: ``ggml_type`` and the structs of blocks in ggml's source.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmi_core.weights.formats import BLOCK_FORMATS, BlockFormat


@dataclass(frozen=True, slots=True)
class TensorType:
    """``num_weights`` neighbours of a row take ``num_bytes``; of floats, one does."""

    name: str
    num_weights: int
    num_bytes: int


_FLOATS = {0: TensorType("F32", 1, 4), 1: TensorType("F16", 1, 2), 30: TensorType("BF16", 1, 2)}
_BLOCKS = {
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    39: TensorType("MXFP4", 32, 17),
}
TYPES = _FLOATS | _BLOCKS
"""By their numbers."""
BLOCK_TYPES: dict[str, BlockFormat] = {
    block.name: name
    for block in _BLOCKS.values()
    for name in BLOCK_FORMATS
    if name == block.name.lower()
}
"""What the engine calls types of blocks."""
OTHER_TYPES = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0",
    40: "NVFP4",
}  # fmt: skip
"""Those that can't be read, for errors."""
