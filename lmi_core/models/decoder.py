"""The decoder, written once for every family: records one forward pass and sampling."""

from __future__ import annotations

from lmi_core import ops
from lmi_core.models.loader import LoadedModel
from lmi_core.models.rope import rope_tables
from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weights import DecoderWeights, LayerWeights
from lmi_core.ops import Handle, KvCache, Recorder


def record(model: LoadedModel, recorder: Recorder, cache: KvCache, max_model_len: int) -> Handle:
    """Record ``model`` for contexts of up to ``max_model_len`` tokens; returns the logits."""
    return Decoder(model.spec, model.weights, cache, max_model_len).record(recorder)


class Decoder:
    """Pre-norm decoder layers between an embedding and an output head."""

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, cache: KvCache, max_model_len: int
    ) -> None:
        self.spec = spec
        self.weights = weights
        self.cache = cache
        self.cos, self.sin = rope_tables(spec.rope, max_model_len)

    def record(self, recorder: Recorder) -> Handle:
        """Record the forward pass and the sampling of its logits, fp32 [L, vocab]."""
        x = ops.embed(recorder, self.weights.embedding)
        for layer_id, layer in enumerate(self.weights.layers):
            x = self._attention(x, layer, layer_id)
            x = self._mlp(x, layer)
        x = ops.gather_logit_rows(x)
        x = ops.rms_norm(x, self.weights.final_norm, self.spec.norm_eps)
        logits = ops.linear(x, self.weights.head.weight, bias=self.weights.head.bias)
        ops.sample(logits)
        return logits

    def _attention(self, x: Handle, layer: LayerWeights, layer_id: int) -> Handle:
        spec = self.spec.attention
        h = ops.rms_norm(x, layer.attention_norm, self.spec.norm_eps)
        qkv = ops.linear(h, layer.qkv.weight, bias=layer.qkv.bias)
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
        return ops.linear(h, output.weight, bias=output.bias, residual=x)

    def _mlp(self, x: Handle, layer: LayerWeights) -> Handle:
        h = ops.rms_norm(x, layer.mlp_norm, self.spec.norm_eps)
        h = ops.linear(
            h,
            layer.gate_up.weight,
            bias=layer.gate_up.bias,
            activation=self.spec.activation,
            out_dtype="act",
        )
        return ops.linear(h, layer.down.weight, bias=layer.down.bias, residual=x)
