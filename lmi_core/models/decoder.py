"""The decoder, written once for every family: records one forward pass and sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lmi_core import ops
from lmi_core.models.experts import add_experts
from lmi_core.models.latent_attention import latent_queries
from lmi_core.models.loader import LoadedModel
from lmi_core.models.lora_linears import linear_id
from lmi_core.models.relative_bias import relative_buckets
from lmi_core.models.rope import rope_tables
from lmi_core.models.slices import WHOLE, Slicing
from lmi_core.models.spec import DecoderSpec, LayerLinear
from lmi_core.models.weights import DecoderWeights, LayerWeights, Linear, Norm
from lmi_core.ops import Graph, Handle, KvCache, LoraTable
from lmi_core.ops.kept_rows import StatesTable
from lmi_core.ops.operands import JoinedWeight, SlicedWeight
from lmi_core.settings.engine_config import StatesOf


@dataclass(frozen=True, slots=True)
class KeptStates:
    """Hidden states of every token, by slot, for a head that drafts: a ``table`` of the act dtype.
    They are the sum of ``linears`` of what ``layers`` read (as many as there are layers: of what is
    behind the last), or, where there are none, the last state, normed."""

    table: StatesTable
    layers: tuple[int, ...]
    linears: tuple[Linear, ...]


def record(
    model: LoadedModel,
    graph: Graph,
    cache: KvCache,
    max_model_len: int,
    adapters: LoraTable | None = None,
    kept: KeptStates | None = None,
    states: StatesOf | None = None,
) -> Handle:
    """Record ``model`` for contexts of up to ``max_model_len`` tokens; returns the logits, or the
    last hidden states of a model that pools, or ``states``, which are an output then.

    ``adapters``: for a model that was loaded with ``takes_adapters``."""
    spec, weights = model.spec, model.weights
    decoder = Decoder(spec, weights, cache, max_model_len, adapters, model.slicing, kept)
    return decoder.record(graph) if states is None else decoder.record_with_states(graph, states)


class Decoder:
    """Layers of attention and MLP, which read and add to one stream, between an embedding and an
    output head. Which norms there are, the weights say."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        cache: KvCache,
        max_model_len: int,
        adapters: LoraTable | None = None,
        slicing: Slicing = WHOLE,
        kept: KeptStates | None = None,
    ) -> None:
        self.spec = spec
        self.kept = kept
        self.slicing = slicing
        self.weights = weights
        self.cache = cache
        self.adapters = adapters
        slopes = spec.attention.slopes
        self.slopes = np.array(slopes, np.float32) if slopes else None
        self.relative = None
        if weights.relative_bias is not None:
            buckets = relative_buckets(spec.attention, max_model_len)
            self.relative = np.ascontiguousarray(weights.relative_bias[buckets].T)
        self.rotations = {rope: rope_tables(rope, max_model_len) for rope in set(spec.ropes)}

    def record(self, graph: Graph) -> Handle:
        """Record the forward pass and the sampling of its logits, fp32 [L, vocab], or what is
        pooled, fp32 [L, hidden]."""
        return self._record_head(self._record_layers(self._embedded(graph)))

    def record_with_rows(self, graph: Graph) -> Handle:
        """As ``record``, of a model that doesn't pool; returns what its final norm reads, fp32
        [L, hidden]."""
        x = ops.gather_logit_rows(self._record_layers(self._embedded(graph)))
        ops.output(x)
        self._record_logits(x)
        return x

    def record_with_states(self, graph: Graph, states: StatesOf) -> Handle:
        """The same, of a model that doesn't pool; returns its tokens' hidden states, fp32
        [T, hidden]: what the first layer reads, or what the last one gives, normed."""
        x = self._embedded(graph)
        if states == "embedding":
            result = self._copied(x, None)
        x = self._record_layers(x)
        if states == "last_layer":
            result = self._copied(x, self.weights.final_norm)
        self._record_head(x)
        return result

    def _copied(self, x: Handle, norm: Norm | None) -> Handle:
        """Of the stream, which is added to in place."""
        x = self._normed(x, norm, out_dtype="fp32")
        ops.output(x)
        return x

    def _record_layers(self, x: Handle) -> Handle:
        fused: Handle | None = None
        for layer_id, layer in enumerate(self.weights.layers):
            fused = self._fused(x, layer_id, fused)
            x = self._layer(x, layer, layer_id)
        if self.kept is not None:
            fused = self._fused(x, len(self.weights.layers), fused)
            last = self.weights.final_norm
            if fused is None:
                fused = x if last is None else self._stream_normed(x, last)
            ops.keep_rows(fused, self.kept.table)
        return x

    def _fused(self, x: Handle, layer_id: int, fused: Handle | None) -> Handle | None:
        """The sum so far of what is kept, with this layer's part."""
        kept = self.kept
        for of, linear in [] if kept is None else zip(kept.layers, kept.linears, strict=True):
            if of == layer_id:
                h = self._normed(x, None)
                fused = self._linear(h, linear, residual=fused)
        return fused

    def _record_head(self, x: Handle) -> Handle:
        weights = self.weights
        x = ops.gather_logit_rows(x)
        if weights.head is None:
            x = x if weights.final_norm is None else self._stream_normed(x, weights.final_norm)
            ops.output(x)
            if self.slicing.num_ranks > 1:
                ops.meet(x)
            return x
        return self._record_logits(x)

    def _record_logits(self, x: Handle) -> Handle:
        spec, weights = self.spec, self.weights
        assert weights.head is not None
        x = self._normed(x, weights.final_norm)
        if weights.project_out is not None:
            x = self._linear(x, weights.project_out, out_dtype="act")
        logits = self._logits(x, weights.head)
        if self.slicing.rank > 0:
            return logits
        if spec.logit_soft_cap:
            logits = ops.soft_cap(logits, spec.logit_soft_cap)
        ops.sample(logits)
        return logits

    def _logits(self, x: Handle, head: Linear) -> Handle:
        assert not isinstance(head.weight, SlicedWeight)
        if self.slicing.num_ranks == 1:
            return self._linear(x, head)
        num_columns = self.spec.vocab_size
        first, _ = self.slicing.vocabulary(num_columns)
        return ops.gathered_linear(
            x, head.weight, bias=head.bias, first_column=first, num_columns=num_columns
        )

    def _embedded(self, graph: Graph) -> Handle:
        spec, weights = self.spec, self.weights
        x = ops.embed(graph, weights.embedding, scale=spec.embedding_scale)
        if weights.project_in is not None:
            x = self._linear(self._normed(x, None), weights.project_in)
        if weights.positions is not None:
            x = ops.add_positions(x, weights.positions, offset=spec.position_offset)
        if weights.token_types is not None:
            x = ops.add_token_types(x, weights.token_types)
        if weights.embedding_norm is not None:
            x = self._stream_normed(x, weights.embedding_norm)
        return x

    def _layer(self, x: Handle, layer: LayerWeights, layer_id: int) -> Handle:
        if self.spec.norms_stream:
            x = self._attention(x, self._normed(x, None), layer, layer_id)
            x = self._stream_normed(x, layer.attention_norm)
            x = self._mlp(x, self._normed(x, None), layer, layer_id)
            return self._stream_normed(x, layer.mlp_norm)
        h = self._normed(x, layer.attention_norm)
        if self.spec.parallel:
            inner = h if layer.mlp_norm is None else self._normed(x, layer.mlp_norm)
        x = self._attention(x, h, layer, layer_id)
        if not self.spec.parallel:
            inner = self._normed(x, layer.mlp_norm)
        return self._mlp(x, inner, layer, layer_id)

    def _normed(self, x: Handle, norm: Norm | None, **settings: Any) -> Handle:
        """What a linear reads; None: the stream as it is. ``settings``: of ``ops.norm``."""
        if norm is None:
            return ops.norm(x, None, None, 0.0, kind="none", **settings)
        spec = self.spec.norm
        return ops.norm(x, norm.weight, norm.bias, spec.eps, kind=spec.kind, **settings)

    def _stream_normed(self, x: Handle, norm: Norm | None) -> Handle:
        assert norm is not None
        return self._normed(x, norm, out_dtype="fp32")

    def _linear(
        self,
        x: Handle,
        linear: Linear,
        of_layer: tuple[int, LayerLinear] | None = None,
        **settings: Any,
    ) -> Handle:
        """What ``linear`` makes of x, with what adapters add to it where it is one ``of_layer``.
        ``settings``: of ``ops.linear``."""
        is_sliced = isinstance(linear.weight, SlicedWeight)
        if is_sliced and of_layer is not None:
            settings["slice_adapters"] = self._slice_adapters(*of_layer)
        y = ops.linear(x, linear.weight, bias=linear.bias, **settings)
        if is_sliced or of_layer is None or self.adapters is None:
            return y
        return ops.lora_add(x, y, self.adapters, linear_id(*of_layer, self.slicing))

    def _slice_adapters(
        self, layer_id: int, linear: LayerLinear
    ) -> tuple[LoraTable, list[int]] | None:
        if self.adapters is None:
            return None
        slices = range(self.slicing.num_own)
        return self.adapters, [linear_id(layer_id, linear, self.slicing, i) for i in slices]

    def _attention(
        self,
        x: Handle,
        h: Handle,
        layer: LayerWeights,
        layer_id: int,
        added: Handle | None = None,
    ) -> Handle:
        """x + what attention makes of h. ``added``: to queries, keys and values."""
        spec = self.spec.attention
        qkv, latent = self._qkv(h, layer, layer_id, added)
        q_norm, k_norm = (layer.q_norm, layer.k_norm) if spec.qk_norm == "head" else (None, None)
        cos, sin = self.rotations[self.spec.ropes[layer_id]]
        # Keys that no later step reads may be overwritten by the next layer's.
        cache_layer = layer_id if self.spec.is_causal else 0
        q = ops.rope_cache_write(
            qkv,
            self.cache,
            cache_layer,
            num_q_heads=spec.num_q_heads,
            cos=cos,
            sin=sin,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            norm_eps=self.spec.norm.eps,
            latent=latent,
        )
        h = ops.attention(
            q,
            self.cache,
            cache_layer,
            num_q_heads=spec.num_q_heads,
            scale=spec.scale,
            window=spec.windows[layer_id],
            soft_cap=spec.soft_cap,
            slopes=self.slopes,
            sinks=layer.sinks,
            sees_later=not self.spec.is_causal,
            relative=self.relative,
        )
        if layer.latent is not None:
            values = layer.latent.from_latent
            h = ops.head_linear(h, values, num_heads=spec.num_q_heads, out_dtype="act")
        linear = LayerLinear.ATTENTION_OUTPUT
        return self._add(x, h, layer.attention_output, layer.attention_post_norm, layer_id, linear)

    def _qkv(
        self, h: Handle, layer: LayerWeights, layer_id: int, added: Handle | None
    ) -> tuple[Handle, Handle | None]:
        """Queries, keys and values, but for norms of each head and the rotation; in a latent space
        queries, and the latent."""
        spec, latent = self.spec.attention, None
        if layer.latent is not None:
            qkv, latent = latent_queries(h, layer.latent, self.spec)
        else:
            assert layer.qkv is not None
            qkv = self._linear(h, layer.qkv, (layer_id, LayerLinear.QKV), residual=added)
        if spec.qk_norm not in ("", "head"):
            qkv = self._norm_heads(qkv, layer)
        if spec.clip:
            qkv = ops.clip(qkv, spec.clip)
        return qkv, latent

    def _norm_heads(self, qkv: Handle, layer: LayerWeights) -> Handle:
        spec = self.spec.attention
        if spec.qk_norm == "row" and self.slicing != WHOLE:
            return self._norm_all_heads(qkv, layer)
        first = 0
        for norm, num_heads in (
            (layer.q_norm, spec.num_q_heads),
            (layer.k_norm, spec.num_kv_heads),
        ):
            assert norm is not None
            assert norm.weight is not None
            qkv = ops.norm_heads(
                qkv,
                norm.weight,
                norm.bias,
                self.spec.norm.eps,
                kind="rms" if spec.qk_norm == "row" else "layer",
                first_column=first,
                num_groups=1 if spec.qk_norm == "row" else num_heads,
            )
            first += norm.weight.size
        return qkv

    def _norm_all_heads(self, qkv: Handle, layer: LayerWeights) -> Handle:
        """As far as this rank has them, by the squares of all ranks."""
        assert layer.q_norm is not None
        assert layer.q_norm.weight is not None
        assert layer.k_norm is not None
        assert layer.k_norm.weight is not None
        return ops.norm_all_heads(
            qkv,
            layer.q_norm.weight,
            layer.k_norm.weight,
            self.spec.norm.eps,
            head_dim=self.spec.attention.head_dim,
            num_alike=self.slicing.ranks_per_kv_head,
        )

    def _mlp(self, x: Handle, h: Handle, layer: LayerWeights, layer_id: int) -> Handle:
        if layer.experts is not None:
            x = add_experts(x, h, layer, self.spec)
        if layer.gate_up is None or layer.down is None:
            return x
        h = self._gate_up(h, layer.gate_up, layer_id)
        return self._add(x, h, layer.down, layer.mlp_post_norm, layer_id, LayerLinear.DOWN)

    def _gate_up(self, h: Handle, gate_up: Linear, layer_id: int) -> Handle:
        activation, gated = self.spec.activation, self.spec.gated
        is_whole = not isinstance(gate_up.weight, JoinedWeight)
        if self.adapters is None and (is_whole or not gated):
            return self._linear(h, gate_up, activation=activation, gated=gated, out_dtype="act")
        y = self._linear(h, gate_up, (layer_id, LayerLinear.GATE_UP))
        return ops.gated_activation(y, activation) if gated else ops.activation(y, activation)

    def _add(
        self,
        x: Handle,
        h: Handle,
        linear: Linear,
        norm: Norm | None,
        layer_id: int,
        linear_of_layer: LayerLinear,
    ) -> Handle:
        """x + what ``linear`` makes of h, normed if there is a norm."""
        of_layer = layer_id, linear_of_layer
        if norm is None:
            return self._linear(h, linear, of_layer, residual=x)
        return self._normed(self._linear(h, linear, of_layer), norm, residual=x)
