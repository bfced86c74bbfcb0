"""The step graph as model code records it, once, for any device: nodes in order, with the values
that they read and give and what is constant in them.

A device lowers it to what it runs: ``ops.cpu`` to kernels on the CPU, ``ops.device.eager`` to
torch calls, ``ops.device.step_lowering`` to a list that C++ launches.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol

RowSymbol = Literal["T", "L", "E"]
"""Tokens, rows of logits, and experts of tokens."""
NormKind = Literal["none", "rms", "layer"]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "clamped_swiglu"]


class LinearWeight(Protocol):
    """A weight matrix in a device's own layout."""

    @property
    def num_outputs(self) -> int: ...
    @property
    def num_inputs(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def row_format(self) -> Hashable | None:
        """How rows are quantised that are multiplied with it; None: they are not."""
        ...


@dataclass(frozen=True, slots=True)
class JoinedWeight:
    """Matrices whose outputs, one after the other, are those of one, each in its own format."""

    parts: tuple[LinearWeight, ...]

    @property
    def num_outputs(self) -> int:
        return sum(part.num_outputs for part in self.parts)

    @property
    def num_inputs(self) -> int:
        return self.parts[0].num_inputs

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def row_format(self) -> Hashable | None:
        """None also where parts take their rows in different ways."""
        formats = {part.row_format for part in self.parts}
        return formats.pop() if len(formats) == 1 else None


@dataclass(frozen=True, slots=True)
class SlicedWeight:
    """Matrices whose inputs, one after the other, are those of one, or of a rank's part of it."""

    slices: tuple[LinearWeight, ...]

    @property
    def num_outputs(self) -> int:
        return self.slices[0].num_outputs

    @property
    def num_inputs(self) -> int:
        return sum(part.num_inputs for part in self.slices)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.slices)

    @property
    def row_format(self) -> None:
        """Each rounds its own inputs."""
        return None


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """Matrices of one shape, for devices that multiply expert by expert."""

    experts: tuple[LinearWeight, ...]
    row_format: Hashable | None = None

    @property
    def num_outputs(self) -> int:
        return self.experts[0].num_outputs

    @property
    def num_inputs(self) -> int:
        return self.experts[0].num_inputs

    @property
    def num_bytes(self) -> int:
        return sum(weight.num_bytes for weight in self.experts)


class KvCache(Protocol):
    """Paged keys and values of all layers, in a device's own layout."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class LoraTable(Protocol):
    """LoRA adapters by slot, in a device's own layout: what steps' adapter slots refer to.

    A slot may be changed while steps run, if none of them refers to it.
    """

    def set(
        self, slot: int, adapter: Sequence[Sequence[tuple[LinearWeight, LinearWeight, int]]]
    ) -> None:
        """By linear id, the parts that the adapter adds to: A [rank, inputs], B [outputs, rank],
        both in the act dtype, and the first of the linear's outputs."""
        ...

    def clear(self, slot: int) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A value of a graph: no data, no arithmetic, no truth value."""

    graph: Graph
    name: str
    dtype: str
    columns: int
    rows: RowSymbol

    def __bool__(self) -> NoReturn:
        raise TypeError(f"{self.name} has no value while a graph is recorded: don't branch on it")


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """An op and what it is given, by its parameters' names."""

    op: str
    operands: Mapping[str, Handle]
    result: Handle | None
    """One of the operands where the op adds to it in place; None: the step's results."""
    attributes: Mapping[str, Any]
    """Weights, caches, tables and numbers."""


class Graph:
    """A forward pass and its sampling. ``act_dtype``: of what products and attention read."""

    def __init__(self, act_dtype: Literal["fp32", "bf16"]) -> None:
        self.act_dtype: Literal["fp32", "bf16"] = act_dtype
        self.nodes: list[Node] = []

    def value(
        self, op: str, dtype: Literal["fp32", "act"], columns: int, rows: RowSymbol
    ) -> Handle:
        """For the result of the next node."""
        stored = self.act_dtype if dtype == "act" else dtype
        return Handle(self, f"{op}{len(self.nodes)}", stored, columns, rows)

    def add(
        self, op: str, result: Handle | None, operands: Mapping[str, Handle], **attributes: Any
    ) -> None:
        self.nodes.append(Node(op, operands, result, attributes))

    def last_uses(self) -> list[tuple[Handle, ...]]:
        """Of each node, the operands that no later one reads."""
        seen: set[Handle] = set()
        uses = []
        for node in reversed(self.nodes):
            uses.append(tuple(h for h in dict.fromkeys(node.operands.values()) if h not in seen))
            seen.update(node.operands.values())
        return uses[::-1]

    def narrow_products(self) -> set[Handle]:
        """Results of products for which the act dtype does, since they are rounded to it anyway
        after a rotation or an activation: those without a bias that are read as a rotation's
        ``qkv`` alone, or that an activation makes numbers of, not codes."""
        readers: dict[Handle, list[str]] = {}
        for node in self.nodes:
            whole = "latent" not in node.operands
            for name, handle in node.operands.items():
                readers.setdefault(handle, []).append(name if whole else node.op)
        quantized = self.quantized_rows()

        def is_narrow(node: Node) -> bool:
            if node.op != "linear" or "residual" in node.operands or node.result in quantized:
                return False
            if node.attributes["bias"] is not None or node.result is None:
                return False
            is_rotated = readers.get(node.result) == ["qkv"]
            return is_rotated or node.attributes["activation"] != ""

        return {node.result for node in self.nodes if is_narrow(node) and node.result is not None}

    def quantized_rows(self) -> dict[Handle, LinearWeight | JoinedWeight]:
        """The values that nobody reads but products that quantise their rows, all of them alike,
        with a weight of these. Who makes the value may give it quantised."""
        readers: dict[Handle, list[LinearWeight | JoinedWeight | None]] = {}
        for node in self.nodes:
            for name, handle in node.operands.items():
                is_product = node.op in ("linear", "gathered_linear") and name == "x"
                reader = node.attributes["weight"] if is_product else None
                readers.setdefault(handle, []).append(reader)
        result = {}
        for handle, weights in readers.items():
            formats = {None if weight is None else weight.row_format for weight in weights}
            if weights[0] is not None and len(formats) == 1 and None not in formats:
                result[handle] = weights[0]
        return result
