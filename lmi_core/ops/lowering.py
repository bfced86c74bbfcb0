"""Lowering of a graph to the CPU's, and what follows from its nodes alone for any device."""

from __future__ import annotations

from lmi_core import _native
from lmi_core.ops.graph import Graph, Handle, Node
from lmi_core.ops.operands import JoinedWeight, LinearWeight, SlicedWeight


def lower(graph: Graph, target: _native.Graph) -> dict[Handle, _native.Handle]:
    """Record ``graph`` into the engine's own, whose methods are the ops; the caller finishes it.
    Returns its handles."""
    quantized = quantized_rows(graph)
    values: dict[Handle, _native.Handle] = {}
    for node in graph.nodes:
        arguments = {**node.attributes, **{name: values[h] for name, h in node.operands.items()}}
        if node.op in ("rms_norm", "norm") and node.result in quantized:
            reader = quantized[node.result]
            arguments["reader"] = reader.parts[0] if isinstance(reader, JoinedWeight) else reader
        if isinstance(arguments.get("weight"), JoinedWeight):
            arguments["weight"] = [*arguments["weight"].parts]
        if isinstance(slices := arguments.get("slices"), SlicedWeight):
            arguments["slices"] = [*slices.slices]
        result = getattr(target, node.op)(**arguments)
        if node.result is not None:
            values[node.result] = result
    return values


def last_uses(graph: Graph) -> list[tuple[Handle, ...]]:
    """Of each node, the operands that no later one reads."""
    seen: set[Handle] = set()
    uses = []
    for node in reversed(graph.nodes):
        uses.append(tuple(h for h in dict.fromkeys(node.operands.values()) if h not in seen))
        seen.update(node.operands.values())
    return uses[::-1]


def narrow_products(graph: Graph) -> set[Handle]:
    """Results of products for which the act dtype does, since they are rounded to it anyway after a
    rotation or an activation: those without a bias that are read as a rotation's ``qkv`` alone, or
    that an activation makes numbers of, not codes."""
    readers: dict[Handle, list[str]] = {}
    for node in graph.nodes:
        whole = "latent" not in node.operands
        for name, handle in node.operands.items():
            readers.setdefault(handle, []).append(name if whole else node.op)
    quantized = quantized_rows(graph)

    def is_narrow(node: Node) -> bool:
        if node.op != "linear" or "residual" in node.operands or node.result in quantized:
            return False
        if node.attributes["bias"] is not None or node.result is None:
            return False
        is_rotated = readers.get(node.result) == ["qkv"]
        return is_rotated or node.attributes["activation"] != ""

    return {node.result for node in graph.nodes if is_narrow(node) and node.result is not None}


def quantized_rows(graph: Graph) -> dict[Handle, LinearWeight | JoinedWeight]:
    """The values that nobody reads but products that quantise their rows, all of them alike, with a
    weight of these. Who makes the value may give it quantised."""
    readers: dict[Handle, list[LinearWeight | JoinedWeight | None]] = {}
    for node in graph.nodes:
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
