"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): its tensors, weights and ops.

One algebraic form, whatever the step: queries are taken to the latent space, where the keys of all
heads are the same, and what they find there is taken to each head's values. So the cache holds one
key head, its rotary part before the normed latent.
"""

from __future__ import annotations

import numpy as np

from lmi_core import ops
from lmi_core.models.slices import Slicing
from lmi_core.models.spec import DecoderSpec, LatentSpec, RowIds
from lmi_core.models.tensor_reader import TensorReader
from lmi_core.models.weights import LatentAttention
from lmi_core.ops import Handle
from lmi_core.weights.formats import FloatArray

NORM_EPS = 1e-6
"""Of the latents' norms, whatever the model's."""


def load_latent(
    reader: TensorReader, spec: DecoderSpec, prefix: str, slicing: Slicing
) -> LatentAttention:
    """``kv_b``, which both ways to and from the latent are made of, stays in 16 or 32 bits. Of
    heads this rank's; latents, which all heads share, are made by every rank."""
    latent, num_heads = spec.attention.latent, spec.attention.num_q_heads
    assert latent is not None
    names = latent.names
    own = slice(*slicing.q_heads(num_heads))

    def own_heads(kv_b: list[FloatArray]) -> list[list[FloatArray]]:
        keys, values = keys_and_values(kv_b, latent, num_heads)
        return [[*matrices[own]] for matrices in head_matrices(keys, values, latent.rope_dim)]

    to_latent, from_latent = reader.heads([prefix + name for name in names.kv_b], own_heads)
    has_q_a = latent.q_rank > 0
    return LatentAttention(
        q_a=reader.linear([prefix + names.q_a]) if has_q_a else None,
        q_a_norm=reader.vector(prefix + names.q_a_norm) if has_q_a else None,
        q=reader.linear(
            [prefix + (names.q_b if has_q_a else names.q)],
            rows=query_rows(latent, num_heads)[own].ravel(),
        ),
        kv_a=reader.linear([prefix + names.kv_a], rows=key_rows(latent)),
        kv_a_norm=reader.vector(prefix + names.kv_a_norm),
        to_latent=to_latent,
        from_latent=from_latent,
    )


def keys_and_values(
    kv_b: list[FloatArray], latent: LatentSpec, num_heads: int
) -> tuple[FloatArray, FloatArray]:
    """From the rows of the tensors of ``LatentNames.kv_b`` to what makes keys [heads, rank, nope]
    of queries, and values [heads, value, rank]."""
    if len(kv_b) == 1:
        heads = kv_b[0].reshape(num_heads, -1, latent.kv_rank)
        return heads[:, : latent.nope_dim].swapaxes(1, 2), heads[:, latent.nope_dim :]
    keys, values = kv_b
    return (
        keys.reshape(num_heads, latent.kv_rank, latent.nope_dim),
        values.reshape(num_heads, latent.value_dim, latent.kv_rank),
    )


def head_matrices(keys: FloatArray, values: FloatArray, rope: int) -> tuple[FloatArray, FloatArray]:
    """Each head's matrix from a query [nope, rope] to the latent space's [rope, rank], and from
    there to values: the rotary part is kept, and has none."""
    num_heads, rank, nope = keys.shape
    to_latent = np.zeros((num_heads, rope + rank, nope + rope), np.float32)
    to_latent[:, :rope, nope:] = np.eye(rope)
    to_latent[:, rope:, :nope] = keys
    from_latent = np.zeros((num_heads, values.shape[1], rope + rank), np.float32)
    from_latent[:, :, rope:] = values
    return to_latent, from_latent


def rotate_half_dims(latent: LatentSpec) -> RowIds:
    """The checkpoint's dimension, where neighbours are rotated together, for each of ours."""
    return np.arange(latent.rope_dim).reshape(-1, 2).T.ravel()


def query_rows(latent: LatentSpec, num_heads: int) -> RowIds:
    """[heads, dimensions]"""
    head = np.arange(latent.nope_dim + latent.rope_dim)
    head[latent.nope_dim :] = latent.nope_dim + rotate_half_dims(latent)
    return np.arange(num_heads)[:, None] * head.size + head


def key_rows(latent: LatentSpec) -> RowIds:
    """The rotary part first."""
    return np.concatenate([latent.kv_rank + rotate_half_dims(latent), np.arange(latent.kv_rank)])


def latent_queries(h: Handle, weights: LatentAttention, spec: DecoderSpec) -> tuple[Handle, Handle]:
    """Queries fp32 [T, heads (rope + rank)] and keys fp32 [T, rope + rank], neither rotated."""
    latent, num_heads = spec.attention.latent, spec.attention.num_q_heads
    assert latent is not None
    queries = h
    if weights.q_a is not None:
        queries = ops.linear(h, weights.q_a.weight, bias=weights.q_a.bias)
        queries = ops.norm(queries, weights.q_a_norm, None, NORM_EPS, kind="rms")
    queries = ops.linear(queries, weights.q.weight, bias=weights.q.bias, out_dtype="act")
    queries = ops.head_linear(queries, weights.to_latent, num_heads=num_heads)
    keys = ops.linear(h, weights.kv_a.weight, bias=weights.kv_a.bias)
    keys = ops.norm_heads(
        keys,
        weights.kv_a_norm,
        None,
        NORM_EPS,
        kind="rms",
        first_column=latent.rope_dim,
        num_groups=1,
    )
    return queries, keys
