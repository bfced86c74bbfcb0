"""Attention over the paged cache, and what comes right before it."""

from __future__ import annotations

from lmi_core.ops.graph import Handle, KvCache
from lmi_core.weights.formats import FloatArray


def rope_cache_write(
    qkv: Handle,
    cache: KvCache,
    layer: int,
    *,
    num_q_heads: int,
    cos: FloatArray,
    sin: FloatArray,
    q_norm: FloatArray | None = None,
    k_norm: FloatArray | None = None,
    norm_eps: float = 0.0,
    latent: Handle | None = None,
) -> Handle:
    """Norm (optional) and rotate heads, write K and V to the cache, return q.

    fp32 qkv [T, (hq + 2 hkv) d] -> act q [T, hq d]. cos, sin: [positions, rotary / 2]. ``latent``:
    fp32 [T, d], the one key, which is the value, too, of a cache of keys alone; ``qkv`` holds
    queries alone then.
    """
    q = qkv.graph.value("q", "act", num_q_heads * cache.head_dim, "T")
    qkv.graph.add(
        "rope_cache_write",
        q,
        {"qkv": qkv} if latent is None else {"qkv": qkv, "latent": latent},
        cache=cache,
        layer=layer,
        num_q_heads=num_q_heads,
        cos=cos,
        sin=sin,
        q_norm=q_norm,
        k_norm=k_norm,
        norm_eps=norm_eps,
    )
    return q


def attention(
    q: Handle,
    cache: KvCache,
    layer: int,
    *,
    num_q_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    slopes: FloatArray | None = None,
    sinks: FloatArray | None = None,
    sees_later: bool = False,
    relative: FloatArray | None = None,
) -> Handle:
    """Causal attention with grouped queries: act [T, hq d] -> act [T, hq d].

    ``window``: keys seen counting the query's own; 0: all. ``soft_cap``: 0: none. ``slopes``: [hq],
    a head's scores grow by its slope times the key's position less the query's (ALiBi).
    ``sinks``: [hq], a head's score that has no value, but its share of the softmax.
    ``sees_later``: sequences are in the step as a whole, and a token sees all of its own, or the
    keys nearer than ``window``. ``relative``: [hq, 2 n], what is added to a head's score by the
    key's position less the query's plus n, of which the longest distance is at most n - 16.
    """
    y = q.graph.value("attention", "act", q.columns, "T")
    bias: dict[str, object] = {} if slopes is None else {"slopes": slopes}
    if sinks is not None:
        bias["sinks"] = sinks
    if sees_later:
        bias |= {"sees_later": True, "relative": relative}
    q.graph.add(
        "attention",
        y,
        {"q": q},
        cache=cache,
        layer=layer,
        num_q_heads=num_q_heads,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        **bias,
    )
    return y
