"""Which type each tensor of a GGUF file gets, by the name of the format.

Format: llama.cpp's quantiser, whose files of these names have these types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lmi_core.weights.gguf.types import TYPES

_BLOCKS = {kind.name: kind.num_weights for kind in TYPES.values()}
_SMALLER = {
    "Q2_K": "IQ4_NL",
    "Q3_K": "IQ4_NL",
    "IQ4_XS": "IQ4_NL",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""What rows get that aren't of whole blocks of 256; those that aren't of 32 either: F16."""


@dataclass(frozen=True, slots=True)
class Mix:
    """``file_type``: llama.cpp's number of it."""

    file_type: int
    kind: str
    """Of all matrices but these."""
    head: str = "Q6_K"
    better: Mapping[str, str] = field(default_factory=dict)
    """Of values or down, in every layer."""
    best: Mapping[str, str] = field(default_factory=dict)
    """Of them in the first and last eighth of layers, and every third between."""

    def kind_of(self, tensor: str, num_inputs: int, layer_id: int, num_layers: int) -> str:
        """The type of a matrix of a layer, by its name in the file."""
        part = "ffn_down" if tensor.startswith("ffn_down") else tensor
        kind = self.better.get(part, self.kind)
        if part in self.best and _is_sensitive(layer_id, num_layers):
            kind = self.best[part]
        return fitting(kind, num_inputs)


def fitting(kind: str, num_inputs: int) -> str:
    """``kind``, or the nearest one that rows of ``num_inputs`` can have."""
    if num_inputs % _BLOCKS[kind]:
        kind = _SMALLER.get(kind, "F16")
    return "F16" if num_inputs % _BLOCKS[kind] else kind


def _is_sensitive(layer_id: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    is_end = layer_id < eighth or layer_id >= 7 * num_layers // 8
    return is_end or (layer_id - eighth) % 3 == 2


_BEST = {"attn_v": "Q6_K", "ffn_down": "Q6_K"}
MIXES = {
    "gguf-f16": Mix(1, "F16", "F16"),
    "gguf-bf16": Mix(32, "BF16", "BF16"),
    "gguf-q8_0": Mix(7, "Q8_0", "Q8_0"),
    "gguf-q6_k": Mix(18, "Q6_K"),
    "gguf-q5_k": Mix(16, "Q5_K"),
    "gguf-q5_k_m": Mix(17, "Q5_K", best=_BEST),
    "gguf-q5_1": Mix(9, "Q5_1"),
    "gguf-q5_0": Mix(8, "Q5_0"),
    "gguf-q4_k": Mix(14, "Q4_K"),
    "gguf-q4_k_m": Mix(15, "Q4_K", best=_BEST),
    "gguf-q4_1": Mix(3, "Q4_1"),
    "gguf-q4_0": Mix(2, "Q4_0"),
    "gguf-iq4_nl": Mix(25, "IQ4_NL"),
    "gguf-iq4_xs": Mix(30, "IQ4_XS"),
    "gguf-q3_k": Mix(11, "Q3_K"),
    "gguf-q3_k_m": Mix(
        12, "Q3_K", better={"attn_v": "Q4_K", "attn_output": "Q4_K"}, best={"ffn_down": "Q4_K"}
    ),
    "gguf-q2_k": Mix(10, "Q2_K", better={"attn_v": "Q3_K", "ffn_down": "Q3_K"}),
}
