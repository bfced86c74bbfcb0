"""Attention of other libraries, for what ours is to be compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.gpu.attention_case import Attention, Inputs


def torch_attention(case: Attention, backend: str, device: str) -> Callable[[], object]:
    """torch's fused attention over contiguous keys and values, which is all that it can read."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def random(num_heads: int, num_tokens: int) -> Tensor:
        shape = (case.num_seqs, num_heads, num_tokens, case.head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    q = random(case.num_q_heads, case.num_rows)
    k, v = (random(case.num_kv_heads, case.num_keys) for _ in range(2))
    is_causal = case.num_rows > 1

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend[backend]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, enable_gqa=True
            )

    return run


def torch_varlen(case: Attention, device: str) -> Callable[[], object]:
    """torch's attention of sequences one behind the other, which are not paged either."""
    from torch.nn.attention.varlen import varlen_attn

    def random(num_heads: int, num_tokens: int) -> Tensor:
        shape = (case.num_seqs * num_tokens, num_heads, case.head_dim)
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    numbers = torch.arange(case.num_seqs + 1, dtype=torch.int32, device=device)
    q = random(case.num_q_heads, case.num_rows)
    k, v = (random(case.num_kv_heads, case.num_keys) for _ in range(2))
    lengths = (case.num_rows, case.num_keys)
    offsets = [numbers * length for length in lengths]
    return lambda: varlen_attn(q, k, v, *offsets, *lengths, window_size=(-1, 0), enable_gqa=True)


def flashinfer_decode(case: Attention, inputs: Inputs) -> Callable[[], object]:
    import flashinfer

    num_columns = -(-case.num_keys // inputs.step.block_size)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=inputs.q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(case.num_seqs + 1, dtype=torch.int32, device=inputs.q.device)
    last = torch.full(
        (case.num_seqs,), (case.num_keys - 1) % inputs.step.block_size + 1, dtype=torch.int32
    )
    wrapper.plan(
        starts * num_columns,
        inputs.step.block_tables.flatten(),
        last.to(inputs.q.device),
        case.num_q_heads,
        case.num_kv_heads,
        case.head_dim,
        inputs.step.block_size,
        q_data_type=torch.bfloat16,
    )
    paged = (-1, inputs.step.block_size, case.num_kv_heads, case.head_dim)
    cache = inputs.keys.view(paged), inputs.values.view(paged)
    q = inputs.q.view(case.num_seqs, case.num_q_heads, case.head_dim)
    return lambda: wrapper.run(q, cache)
