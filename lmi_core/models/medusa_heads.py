"""Medusa heads: what a checkpoint of them has, and whether it fits the model that it is for.

Each guesses one token more ahead from a model's last hidden state: blocks of a linear layer, SiLU
and a residual, and an output matrix of its own (Cai et al., 2024, section 2.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lmi_core import ops
from lmi_core.errors import ModelError
from lmi_core.files import read_json_object
from lmi_core.models.head_tensors import check_heads, num_weights, read_floats
from lmi_core.models.spec import DecoderSpec
from lmi_core.ops import Handle
from lmi_core.ops.operands import LinearWeight
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.safetensors_file import TensorInfo, read_header

FILE = "medusa_lm_head.safetensors"
_NUM_HEADS = "medusa_num_heads"
_NUM_LAYERS = "medusa_num_layers"


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Of a directory whose headers were checked."""

    path: Path
    num_heads: int
    num_layers: int
    tensors: Mapping[str, TensorInfo]

    @property
    def num_weights(self) -> int:
        """Of all matrices."""
        return num_weights(self.tensors)

    @property
    def description(self) -> str:
        return f"{self.num_heads} Medusa heads of {self.path}"

    def blocks(self, head: int) -> list[tuple[FloatArray, FloatArray]]:
        """Weight [hidden, hidden] and bias [hidden] of a head's blocks."""
        names = [f"{head}.{layer}.linear" for layer in range(self.num_layers)]
        return [(self._read(f"{name}.weight"), self._read(f"{name}.bias")) for name in names]

    def output(self, head: int) -> FloatArray:
        """[vocab, hidden]."""
        return self._read(f"{head}.{self.num_layers}.weight")

    def _read(self, name: str) -> FloatArray:
        return read_floats(self.tensors[name])


def record_head(
    x: Handle, heads: MedusaHeads, head: int, pack: Callable[[FloatArray], LinearWeight]
) -> None:
    """What one head samples behind the model's normed states ``x``, fp32 [L, hidden]. ``pack``
    makes weights of its matrices."""

    def plain(x: Handle) -> Handle:
        return ops.norm(x, None, None, 0.0, kind="none")

    for weight, bias in heads.blocks(head):
        y = ops.linear(plain(x), pack(weight), bias=bias)
        y = ops.activation(y, "silu")
        x = ops.norm(y, None, None, 0.0, kind="none", residual=x)
    ops.sample(ops.linear(plain(x), pack(heads.output(head))))


def has_medusa_heads(directory: Path) -> bool:
    """Whether a directory says that it is of such heads."""
    config = directory / "config.json"
    return config.is_file() and _NUM_HEADS in read_json_object(config)


def find_medusa_heads(directory: Path, spec: DecoderSpec) -> MedusaHeads:
    """Check all but the weights of the heads in ``directory``. Raises ModelError, naming every
    tensor that is missing or of another size than the model's."""
    config = read_json_object(directory / "config.json")
    num_heads, num_layers = (
        _count(directory, config, name, default)
        for name, default in ((_NUM_HEADS, None), (_NUM_LAYERS, 1))
    )
    path = directory / FILE
    if not path.is_file():
        raise ModelError(f"{directory} has no {FILE}, which holds Medusa heads", field=FILE)
    found = read_header(path)
    expected = {
        name: shape
        for head in range(num_heads)
        for name, shape in _shapes(head, num_layers, spec).items()
    }
    tensors = check_heads(path, found, expected, spec)
    return MedusaHeads(directory, num_heads, num_layers, tensors)


def _shapes(head: int, num_layers: int, spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(num_layers):
        shapes[f"{head}.{layer}.linear.weight"] = (hidden, hidden)
        shapes[f"{head}.{layer}.linear.bias"] = (hidden,)
    shapes[f"{head}.{num_layers}.weight"] = (spec.vocab_size, hidden)
    return shapes


def _count(directory: Path, config: Mapping[str, object], name: str, default: int | None) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 64:
        raise ModelError(
            f"{directory / 'config.json'}: {name} is {value!r:.40}; allowed are 1 to 64",
            field=name,
        )
    return value
