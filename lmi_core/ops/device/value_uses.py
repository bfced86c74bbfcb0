"""Where the values of a graph are used, as its nodes alone tell."""

from __future__ import annotations

from lmi_core.ops.graph import Graph, Handle, Node, quantized_rows


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
