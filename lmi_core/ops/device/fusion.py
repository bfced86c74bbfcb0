"""Rows that the kernel quantises which makes them, among the nodes of a step list."""

from __future__ import annotations

from typing import cast

from lmi_core.ops.device.recorded_steps import Node, Value
from lmi_core.ops.kernels.cuda.activation import can_quantize


def fuse_quantization(nodes: list[Node], values: list[Value]) -> None:
    """Take out of ``nodes`` what norms and activations can do on their way, and out of ``values``
    what nobody reads then. A value that is wanted in a second type of codes keeps its node."""
    makers = {node.arguments["y"]: node for node in nodes if _quantizes(node)}
    quantizers = [node for node in nodes if node.name == "quantize_rows"]
    fused = []
    for node in quantizers:
        x = cast(Value, node.arguments["x"])
        maker = makers.pop(x, None)
        if maker is None:
            continue
        for name in ("codes", "scales"):
            cast(Value, node.arguments[name]).first = x.first
        for name in ("codes", "scales", "stride", "code_type"):
            maker.arguments[name] = node.arguments[name]
        nodes.remove(node)
        fused.append((maker, x))
    arguments = [item for node in nodes for item in node.arguments.items()]
    read = {value for name, value in arguments if name != "y" and isinstance(value, Value)}
    for maker, x in fused:
        if x not in read:
            maker.arguments["y"] = None
            values.remove(x)


def _quantizes(node: Node) -> bool:
    columns = cast(int, node.arguments.get("num_columns", 0))
    return node.name == "rms_norm" or (node.name == "gated_activation" and can_quantize(columns))
