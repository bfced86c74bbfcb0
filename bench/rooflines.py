"""How fast a model's steps could be at most, from its shape and the machine's roofs."""

from __future__ import annotations

from bench.checkpoints import Shape
from bench.roofs import Roofs

ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
"""Of the dtypes that have a roof."""


def gflops_of(dtype: str, roofs: Roofs) -> float:
    return {"bf16": roofs.bf16_gflops, "fp32": roofs.fp32_gflops}[dtype]


def prefill_roof_s(shape: Shape, dtype: str, num_tokens: int, roofs: Roofs) -> float:
    """Operations of the linears, of causal attention, and of the head for one token."""
    head = shape.vocab_size * shape.hidden_size
    linear = 2 * (shape.linear_params - head) * num_tokens + 2 * head
    attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * num_tokens**2
    return (linear + attention) / (gflops_of(dtype, roofs) * 1e9)


def decode_roof_s(shape: Shape, dtype: str, batch: int, context: float, roofs: Roofs) -> float:
    """One step: its bytes (linears, head, KV) or its operations, whichever takes longer."""
    kv_row = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    num_bytes = ELEMENT_BYTES[dtype] * (shape.linear_params + batch * context * kv_row)
    return max(
        num_bytes / (roofs.read_gb_per_s * 1e9),
        2 * shape.linear_params * batch / (gflops_of(dtype, roofs) * 1e9),
    )
