"""The decoder, written once for every family: records one forward pass and sampling."""

from __future__ import annotations

from lmi_core import ops
from lmi_core.models.loader import LoadedModel
from lmi_core.models.lora_linears import LayerLinear, linear_id
from lmi_core.models.rope import rope_tables
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weights import DecoderWeights, LayerWeights, Linear
from lmi_core.ops import Graph, Handle, KvCache, LoraTable


def record(
    model: LoadedModel,
    graph: Graph,
    cache: KvCache,
    max_model_len: int,
    adapters: LoraTable | None = None,
) -> Handle:
    """Record ``model`` for contexts of up to ``max_model_len`` tokens; returns the logits.

    ``adapters``: for a model that was loaded with ``takes_adapters``."""
    return Decoder(model.spec, model.weights, cache, max_model_len, adapters).record(graph)


class Decoder:
    """Pre-norm decoder layers between an embedding and an output head."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        cache: KvCache,
        max_model_len: int,
        adapters: LoraTable | None = None,
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.cache = cache
        self.adapters = adapters
        self.cos, self.sin = rope_tables(spec.rope, max_model_len)

    def record(self, graph: Graph) -> Handle:
        """Record the forward pass and the sampling of its logits, fp32 [L, vocab]."""
        x = ops.embed(graph, self.weights.embedding)
        for layer_id, layer in enumerate(self.weights.layers):
            x = self._attention(x, layer, layer_id)
            x = self._mlp(x, layer, layer_id)
        x = ops.gather_logit_rows(x)
        x = ops.rms_norm(x, self.weights.final_norm, self.spec.norm_eps)
        logits = ops.linear(x, self.weights.head.weight, bias=self.weights.head.bias)
        ops.sample(logits)
        return logits

    def _attention(self, x: Handle, layer: LayerWeights, layer_id: int) -> Handle:
        spec = self.spec.attention
        h = ops.rms_norm(x, layer.attention_norm, self.spec.norm_eps)
        qkv = ops.linear(h, layer.qkv.weight, bias=layer.qkv.bias)
        qkv = self._adapt(h, qkv, layer_id, LayerLinear.QKV)
        q = ops.rope_cache_write(
            qkv,
            self.cache,
            layer_id,
            num_q_heads=spec.num_q_heads,
            cos=self.cos,
            sin=self.sin,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=self.spec.norm_eps,
        )
        h = ops.attention(
            q,
            self.cache,
            layer_id,
            num_q_heads=spec.num_q_heads,
            scale=spec.scale,
            window=spec.windows[layer_id],
        )
        output = layer.attention_output
        x = ops.linear(h, output.weight, bias=output.bias, residual=x)
        return self._adapt(h, x, layer_id, LayerLinear.ATTENTION_OUTPUT)

    def _mlp(self, x: Handle, layer: LayerWeights, layer_id: int) -> Handle:
        h = ops.rms_norm(x, layer.mlp_norm, self.spec.norm_eps)
        h = self._gate_up(h, layer.gate_up, layer_id)
        x = ops.linear(h, layer.down.weight, bias=layer.down.bias, residual=x)
        return self._adapt(h, x, layer_id, LayerLinear.DOWN)

    def _gate_up(self, h: Handle, gate_up: Linear, layer_id: int) -> Handle:
        activation = self.spec.activation
        if self.adapters is None:
            return ops.linear(
                h, gate_up.weight, bias=gate_up.bias, activation=activation, out_dtype="act"
            )
        y = ops.linear(h, gate_up.weight, bias=gate_up.bias)
        y = self._adapt(h, y, layer_id, LayerLinear.GATE_UP)
        return ops.gated_activation(y, activation)

    def _adapt(self, x: Handle, y: Handle, layer_id: int, linear: LayerLinear) -> Handle:
        """y of a linear for x with what adapters add to it."""
        if self.adapters is None:
            return y
        return ops.lora_add(x, y, self.adapters, linear_id(layer_id, linear))
