"""How fast a model's steps could be at most, from its shape and the machine's roofs."""

from __future__ import annotations

from bench.checkpoints import Shape
from bench.roofs import Roofs

ELEMENT_BYTES = {"bf16": 2.0, "fp32": 4.0, "int8": 1.0, "int4": 4.25 / 8}
"""Bytes of a layer's weight, for the dtypes that have a roof; int4 with the scale and zero point of
128 weights."""


def head_bytes(dtype: str) -> float:
    """Of a weight of the output head, which int4 leaves at int8."""
    return 1.0 if dtype == "int4" else ELEMENT_BYTES[dtype]


def kv_bytes(dtype: str) -> int:
    """Of a key's or value's element."""
    return 4 if dtype == "fp32" else 2


def gflops_of(dtype: str, roofs: Roofs) -> float:
    """Of the linears; int4 computes as int8 does."""
    return {"bf16": roofs.bf16_gflops, "fp32": roofs.fp32_gflops}.get(dtype, roofs.int8_gops)


def prefill_roof_s(shape: Shape, dtype: str, num_tokens: int, roofs: Roofs) -> float:
    """Operations of the linears, of causal attention, and of the head for one token."""
    head = shape.vocab_size * shape.hidden_size
    linear = 2 * (shape.linear_params - head) * num_tokens + 2 * head
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens**2
    attention_gflops = roofs.fp32_gflops if dtype == "fp32" else roofs.bf16_gflops
    return (linear / gflops_of(dtype, roofs) + attention / attention_gflops) * 1e-9


def decode_roof_s(shape: Shape, dtype: str, batch: int, context: float, roofs: Roofs) -> float:
    """One step: its bytes (linears, head, KV) or its operations, whichever takes longer."""
    kv_row = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    head = shape.vocab_size * shape.hidden_size
    num_bytes = (
        ELEMENT_BYTES[dtype] * (shape.linear_params - head)
        + head_bytes(dtype) * head
        + kv_bytes(dtype) * batch * context * kv_row
    )
    return max(
        num_bytes / (roofs.read_gb_per_s * 1e9),
        2 * shape.linear_params * batch / (gflops_of(dtype, roofs) * 1e9),
    )
