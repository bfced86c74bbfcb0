"""From pooled hidden states to an embedding or a score, in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from lmi_core.errors import ModelError
from lmi_core.files import read_json_object
from lmi_core.models.pooling import PooledRows, PoolingSpec
from lmi_core.weights.checkpoint import read_checkpoint
from lmi_core.weights.float_tensors import read_array, to_float32
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.hf_config import UnsupportedSettingError

LogitRows = Literal["none", "first", "last", "all"]
"""Of a sequence's rows in a step, those whose results are wanted."""
Activation = Literal["", "tanh", "gelu"]


class HeadLayer(NamedTuple):
    """A linear layer behind the pooling, as a checkpoint has it."""

    name: str
    num_outputs: int
    num_inputs: int
    bias: bool = True
    activation: Activation = ""
    norm: str = ""
    """Of a LayerNorm's weight without bias, behind the activation."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its tensors, by name."""
        shape: tuple[int, ...] = (self.num_outputs, self.num_inputs)
        shapes = {f"{self.name}.weight": shape}
        if self.bias:
            shapes[f"{self.name}.bias"] = (self.num_outputs,)
        if self.norm:
            shapes[self.norm] = (self.num_outputs,)
        return shapes


@dataclass(frozen=True, slots=True)
class Dense:
    """activation(weight x + bias), normed if there is ``norm``."""

    weight: FloatArray
    bias: FloatArray | None
    activation: Activation = ""
    norm: FloatArray | None = None
    norm_eps: float = 0.0

    def __call__(self, x: FloatArray) -> FloatArray:
        y = self.weight @ x
        if self.bias is not None:
            y = y + self.bias
        y = _ACTIVATIONS[self.activation](y)
        if self.norm is not None:
            y = y - y.mean(dtype=np.float32)
            y = y / np.sqrt((y * y).mean(dtype=np.float32) + np.float32(self.norm_eps)) * self.norm
        return y.astype(np.float32, copy=False)


class PoolingHead:
    """Layers of one vector; the same bits for the same vector, whatever else is asked."""

    def __init__(self, spec: PoolingSpec, layers: tuple[Dense, ...], hidden_size: int) -> None:
        self.spec = spec
        self.layers = layers
        self.size = len(layers[-1].weight) if layers else hidden_size

    def embedding(
        self, pooled: FloatArray, dimensions: int | None, *, normalize: bool
    ) -> FloatArray:
        """fp32 [dimensions], of length 1 with ``normalize``."""
        vector = self._applied(pooled)[:dimensions]
        if normalize:
            length = math.sqrt(float((vector.astype(np.float64) ** 2).sum()))
            vector = vector / np.float32(max(length, 1e-12))
        return vector

    def score(self, pooled: FloatArray, *, raw: bool) -> FloatArray:
        """fp32 [1]: the last layer's output, or its sigmoid."""
        score = float(self._applied(pooled)[0])
        if not raw:
            score = 1 / (1 + math.exp(-score)) if score > -700 else 0.0
        return np.array([score], np.float32)

    def _applied(self, vector: FloatArray) -> FloatArray:
        for layer in self.layers:
            vector = layer(vector)
        return vector


class RowSum:
    """The rows of a prompt's hidden states, taken up chunk by chunk.

    Rows are added up in the order of positions, each to the sum of those before it, so that the
    sum's bits don't depend on the chunks."""

    __slots__ = ("_rows", "_sum")

    def __init__(self, rows: PooledRows) -> None:
        self._rows = rows
        self._sum: FloatArray | None = None

    def wanted(self, start: int, otherwise: LogitRows) -> LogitRows:
        """Which rows of a chunk from position ``start`` on are pooled; ``otherwise``: if it is
        the last one that is."""
        if self._rows == "last":
            return otherwise
        return "all" if self._rows == "all" else "none" if start else "first"

    def add(self, rows: FloatArray, num_tokens: int) -> None:
        """fp32 [rows, hidden], from the first one wanted of a chunk of ``num_tokens`` on."""
        rows = rows[: num_tokens if self._rows == "all" else 1]
        if self._sum is not None:
            rows = np.concatenate([self._sum[None], rows])
        self._sum = np.add.reduce(rows, axis=0)

    def pooled(self, num_tokens: int) -> FloatArray:
        """Of a prompt, the mean of its rows, or its one row: fp32 [hidden]."""
        assert self._sum is not None
        return self._sum / np.float32(num_tokens) if self._rows == "all" else self._sum


def read_dense(directory: Path) -> Dense:
    """A Dense module of sentence-transformers. Raises ModelError."""
    config = read_json_object(directory / "config.json")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = _MODULES.get(name.rpartition(".")[2])
    if activation is None:
        raise UnsupportedSettingError(
            f"{directory}/config.json: activation_function is {name!r}; here are "
            f"{', '.join(_MODULES)}",
            field="activation_function",
        )
    tensors = read_checkpoint(directory)
    arrays = {name: to_float32(read_array(info), info.dtype) for name, info in tensors.items()}
    if "linear.weight" not in arrays or arrays["linear.weight"].ndim != 2:
        raise ModelError(f"{directory} has no matrix linear.weight", field="model")
    return Dense(arrays["linear.weight"], arrays.get("linear.bias"), activation)


def _gelu(x: FloatArray) -> FloatArray:
    erf = np.array([math.erf(value) for value in (x * math.sqrt(0.5)).tolist()], np.float32)
    return (0.5 * x * (1 + erf)).astype(np.float32)


_ACTIVATIONS: dict[str, Callable[[FloatArray], FloatArray]] = {
    "": lambda x: x,
    "tanh": np.tanh,
    "gelu": _gelu,
}
_MODULES: dict[str, Activation] = {"Tanh": "tanh", "Identity": "", "GELU": "gelu"}
