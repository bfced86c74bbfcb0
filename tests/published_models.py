"""Models that Transformers doesn't have, written down from their published definitions: references
for our own, with the checkpoints' names of settings and tensors. Every family spells out its own
layer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, normalize, silu

from tests.published_parts import (
    Published,
    Shapes,
    Tensor,
    attend,
    heads_of,
    layers,
    register,
    rms,
    rotate_halves,
    rotate_neighbours,
)


def llama_shapes(c: Any, layer: Shapes, head: bool = True) -> Shapes:
    """A Llama's, but for the projections of attention."""
    hidden, inner = c.hidden_size, c.intermediate_size
    layer = layer | {
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes: Shapes = {
        "model.embed_tokens.weight": (c.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if head:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    return shapes | layers(c.num_hidden_layers, "model.layers.{}.", layer)


def llama_mlp(w: Any, x: Tensor) -> Tensor:
    gate, up = (linear(x, w[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
    return linear(silu(gate) * up, w["mlp.down_proj.weight"])


@register("baichuan13b", max_position_embeddings="model_max_length")
class BaichuanForCausalLM(Published):
    """ALiBi; ``z_loss_weight`` tells the second one, whose head is normalised."""

    @staticmethod
    def shapes(c: Any) -> Shapes:
        return llama_shapes(c, {"self_attn.W_pack.weight": (3 * c.hidden_size, c.hidden_size)})

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        count = self.config.num_attention_heads
        powers = [2 ** (-8 * (i + 1) / count) for i in range(count)]  # of a power of two
        return q, k, torch.tensor(powers, dtype=torch.float64)

    def forward_ids(self, ids: Tensor) -> Tensor:
        c, top = self.config, self._weights()
        x = top["model.embed_tokens.weight"][ids]
        for layer in range(c.num_hidden_layers):
            w = self._weights(f"model.layers.{layer}.")
            h = rms(x, w["input_layernorm.weight"], c.rms_norm_eps)
            q, k, v = linear(h, w["self_attn.W_pack.weight"]).chunk(3, -1)
            q, k, v = (heads_of(part, c.num_attention_heads) for part in (q, k, v))
            q, k, slopes = self.turn(q, k)
            x = x + linear(attend(q, k, v, slopes), w["self_attn.o_proj.weight"])
            x = x + llama_mlp(w, rms(x, w["post_attention_layernorm.weight"], c.rms_norm_eps))
        head = top["lm_head.weight"]
        head = normalize(head) if hasattr(c, "z_loss_weight") else head
        return linear(rms(x, top["model.norm.weight"], c.rms_norm_eps), head)


@register("baichuan")
class BaiChuanForCausalLM(BaichuanForCausalLM):
    """Of 7B, which rotates."""

    def turn(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return rotate_halves(q, 10000.0), rotate_halves(k, 10000.0), None


@register(
    "chatglm",
    num_hidden_layers="num_layers",
    intermediate_size="ffn_hidden_size",
    max_position_embeddings="seq_length",
    vocab_size="padded_vocab_size",
)
class ChatGLMForConditionalGeneration(Published):
    """2 and 3: half of a head is rotated by neighbours, query heads share keys in groups."""

    @staticmethod
    def shapes(c: Any) -> Shapes:
        hidden, inner = c.hidden_size, c.ffn_hidden_size
        outputs = c.kv_channels * (c.num_attention_heads + 2 * c.multi_query_group_num)
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attention.query_key_value.weight": (outputs, hidden),
            "self_attention.query_key_value.bias": (outputs,),
            "self_attention.dense.weight": (hidden, c.kv_channels * c.num_attention_heads),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.dense_h_to_4h.weight": (2 * inner, hidden),
            "mlp.dense_4h_to_h.weight": (hidden, inner),
        }
        return {
            "transformer.embedding.word_embeddings.weight": (c.padded_vocab_size, hidden),
            **layers(c.num_layers, "transformer.encoder.layers.{}.", layer),
            "transformer.encoder.final_layernorm.weight": (hidden,),
            "transformer.output_layer.weight": (c.padded_vocab_size, hidden),
        }

    def forward_ids(self, ids: Tensor) -> Tensor:
        c, top, eps = self.config, self._weights("transformer."), self.config.layernorm_epsilon
        theta, size = 10000.0 * getattr(c, "rope_ratio", 1.0), c.kv_channels
        groups = c.multi_query_group_num
        x = top["embedding.word_embeddings.weight"][ids]
        for layer in range(c.num_layers):
            w = self._weights(f"transformer.encoder.layers.{layer}.")
            h = rms(x, w["input_layernorm.weight"], eps)
            mixed = linear(
                h, *(w[f"self_attention.query_key_value.{n}"] for n in ("weight", "bias"))
            )
            q, k, v = mixed.split([c.num_attention_heads * size, groups * size, groups * size], -1)
            q = rotate_neighbours(heads_of(q, c.num_attention_heads), size // 2, theta)
            k = rotate_neighbours(heads_of(k, groups), size // 2, theta)
            mixed = attend(q, k, heads_of(v, groups))
            x = x + linear(mixed, w["self_attention.dense.weight"])
            h = rms(x, w["post_attention_layernorm.weight"], eps)
            gate, up = linear(h, w["mlp.dense_h_to_4h.weight"]).chunk(2, -1)
            x = x + linear(silu(gate) * up, w["mlp.dense_4h_to_h.weight"])
        x = rms(x, top["encoder.final_layernorm.weight"], eps)
        return linear(x, top["output_layer.weight"])


class Llama(Published):
    """What InternLM 1 and MiniCPM have in common; biases where there are some."""

    def forward_ids(self, ids: Tensor) -> Tensor:
        c, top = self.config, self._weights()
        theta, (of_embedding, of_residual, of_logits) = self.theta(), self.factors()
        x = of_embedding * top["model.embed_tokens.weight"][ids]
        for layer in range(c.num_hidden_layers):
            w = self._weights(f"model.layers.{layer}.")

            def project(name: str, y: Tensor, w: Any = w) -> Tensor:
                prefix = f"self_attn.{name}_proj."
                return linear(y, w[f"{prefix}weight"], w.get(f"{prefix}bias"))

            h = rms(x, w["input_layernorm.weight"], c.rms_norm_eps)
            k, v = (heads_of(project(name, h), c.num_key_value_heads) for name in "kv")
            q = rotate_halves(heads_of(project("q", h), c.num_attention_heads), theta)
            x = x + of_residual * project("o", attend(q, rotate_halves(k, theta), v))
            h = rms(x, w["post_attention_layernorm.weight"], c.rms_norm_eps)
            x = x + of_residual * llama_mlp(w, h)
        x = rms(x, top["model.norm.weight"], c.rms_norm_eps) * of_logits
        return linear(x, top.get("lm_head.weight", top["model.embed_tokens.weight"]))

    def theta(self) -> float:
        return 10000.0

    def factors(self) -> tuple[float, float, float]:
        return 1.0, 1.0, 1.0


@register("internlm")
class InternLMForCausalLM(Llama):
    """Biases of all four projections of attention, and a key for every query."""

    @staticmethod
    def shapes(c: Any) -> Shapes:
        layer: Shapes = {}
        for name in "qkvo":
            layer[f"self_attn.{name}_proj.weight"] = (c.hidden_size, c.hidden_size)
            layer[f"self_attn.{name}_proj.bias"] = (c.hidden_size,)
        return llama_shapes(c, layer)

    def theta(self) -> float:
        return float(self.config.rotary["base"])


@register("internlm2")
class InternLM2ForCausalLM(Published):
    """``wqkv`` has, for each key and value head, its queries, then its key and its value."""

    @staticmethod
    def shapes(c: Any) -> Shapes:
        hidden, inner = c.hidden_size, c.intermediate_size
        heads = c.num_attention_heads + 2 * c.num_key_value_heads
        layer = {
            "attention.wqkv.weight": (heads * hidden // c.num_attention_heads, hidden),
            "attention.wo.weight": (hidden, hidden),
            "feed_forward.w1.weight": (inner, hidden),
            "feed_forward.w2.weight": (hidden, inner),
            "feed_forward.w3.weight": (inner, hidden),
            "attention_norm.weight": (hidden,),
            "ffn_norm.weight": (hidden,),
        }
        return {
            "model.tok_embeddings.weight": (c.vocab_size, hidden),
            **layers(c.num_hidden_layers, "model.layers.{}.", layer),
            "model.norm.weight": (hidden,),
            "output.weight": (c.vocab_size, hidden),
        }

    def forward_ids(self, ids: Tensor) -> Tensor:
        c, top = self.config, self._weights()
        shared = c.num_attention_heads // c.num_key_value_heads
        x = top["model.tok_embeddings.weight"][ids]
        for layer in range(c.num_hidden_layers):
            w = self._weights(f"model.layers.{layer}.")
            h = rms(x, w["attention_norm.weight"], c.rms_norm_eps)
            mixed = linear(h, w["attention.wqkv.weight"])
            mixed = mixed.unflatten(-1, (c.num_key_value_heads, shared + 2, -1))
            q, k, v = mixed[:, :, :shared].flatten(1, 2), mixed[:, :, -2], mixed[:, :, -1]
            q, k = rotate_halves(q, c.rope_theta), rotate_halves(k, c.rope_theta)
            x = x + linear(attend(q, k, v), w["attention.wo.weight"])
            h = rms(x, w["ffn_norm.weight"], c.rms_norm_eps)
            gate, up = (linear(h, w[f"feed_forward.w{i}.weight"]) for i in (1, 3))
            x = x + linear(silu(gate) * up, w["feed_forward.w2.weight"])
        return linear(rms(x, top["model.norm.weight"], c.rms_norm_eps), top["output.weight"])


@register("qwen")
class QWenLMHeadModel(Published):
    """``intermediate_size`` is twice that of each of w1 and w2, of which w2 has the activation."""

    @staticmethod
    def shapes(c: Any) -> Shapes:
        hidden, inner, own = c.hidden_size, c.intermediate_size // 2, c.kv_channels
        size = own * c.num_attention_heads
        layer = {
            "ln_1.weight": (hidden,),
            "attn.c_attn.weight": (3 * size, hidden),
            "attn.c_attn.bias": (3 * size,),
            "attn.c_proj.weight": (hidden, size),
            "ln_2.weight": (hidden,),
            "mlp.w1.weight": (inner, hidden),
            "mlp.w2.weight": (inner, hidden),
            "mlp.c_proj.weight": (hidden, inner),
        }
        return {
            "transformer.wte.weight": (c.vocab_size, hidden),
            **layers(c.num_hidden_layers, "transformer.h.{}.", layer),
            "transformer.ln_f.weight": (hidden,),
            "lm_head.weight": (c.vocab_size, hidden),
        }

    def forward_ids(self, ids: Tensor) -> Tensor:
        c, top = self.config, self._weights()
        x = top["transformer.wte.weight"][ids]
        for layer in range(c.num_hidden_layers):
            w = self._weights(f"transformer.h.{layer}.")
            h = rms(x, w["ln_1.weight"], c.layer_norm_epsilon)
            q, k, v = linear(h, w["attn.c_attn.weight"], w["attn.c_attn.bias"]).chunk(3, -1)
            q, k, v = (heads_of(part, c.num_attention_heads) for part in (q, k, v))
            q, k = (rotate_halves(part, c.rotary_emb_base) for part in (q, k))
            x = x + linear(attend(q, k, v), w["attn.c_proj.weight"])
            h = rms(x, w["ln_2.weight"], c.layer_norm_epsilon)
            h = linear(h, w["mlp.w1.weight"]) * silu(linear(h, w["mlp.w2.weight"]))
            x = x + linear(h, w["mlp.c_proj.weight"])
        x = rms(x, top["transformer.ln_f.weight"], c.layer_norm_epsilon)
        return linear(x, top["lm_head.weight"])


@register("exaone", num_hidden_layers="num_layers")
class ExaoneForCausalLM(Published):
    """Llama by GPT-2's names; ``c_fc_0`` has the activation."""

    @staticmethod
    def shapes(c: Any) -> Shapes:
        hidden, inner = c.hidden_size, c.intermediate_size
        kv_size = hidden // c.num_attention_heads * c.num_key_value_heads
        sizes = {"q_proj": hidden, "k_proj": kv_size, "v_proj": kv_size, "out_proj": hidden}
        layer: Shapes = {"ln_1.weight": (hidden,), "ln_2.weight": (hidden,)}
        layer |= {f"attn.attention.{n}.weight": (size, hidden) for n, size in sizes.items()}
        layer |= {f"mlp.c_fc_{i}.weight": (inner, hidden) for i in range(2)}
        return {
            "transformer.wte.weight": (c.vocab_size, hidden),
            **layers(
                c.num_layers, "transformer.h.{}.", layer | {"mlp.c_proj.weight": (hidden, inner)}
            ),
            "transformer.ln_f.weight": (hidden,),
            "lm_head.weight": (c.vocab_size, hidden),
        }

    def forward_ids(self, ids: Tensor) -> Tensor:
        c, top = self.config, self._weights()
        x = top["transformer.wte.weight"][ids]
        for layer in range(c.num_layers):
            w = self._weights(f"transformer.h.{layer}.")
            h = rms(x, w["ln_1.weight"], c.layer_norm_epsilon)
            q, k, v = (linear(h, w[f"attn.attention.{n}_proj.weight"]) for n in "qkv")
            k, v = heads_of(k, c.num_key_value_heads), heads_of(v, c.num_key_value_heads)
            q = rotate_halves(heads_of(q, c.num_attention_heads), c.rope_theta)
            mixed = attend(q, rotate_halves(k, c.rope_theta), v)
            x = x + linear(mixed, w["attn.attention.out_proj.weight"])
            h = rms(x, w["ln_2.weight"], c.layer_norm_epsilon)
            h = silu(linear(h, w["mlp.c_fc_0.weight"])) * linear(h, w["mlp.c_fc_1.weight"])
            x = x + linear(h, w["mlp.c_proj.weight"])
        x = rms(x, top["transformer.ln_f.weight"], c.layer_norm_epsilon)
        return linear(x, top["lm_head.weight"])


@register("minicpm")
class MiniCPMForCausalLM(Llama):
    """Embeddings, what layers add and the last hidden states are multiplied."""

    @staticmethod
    def shapes(c: Any) -> Shapes:
        kv_size = c.hidden_size // c.num_attention_heads * c.num_key_value_heads
        sizes = {"q": c.hidden_size, "k": kv_size, "v": kv_size}
        layer = {f"self_attn.{n}_proj.weight": (s, c.hidden_size) for n, s in sizes.items()}
        return llama_shapes(c, layer, head=not c.tie_word_embeddings)

    def factors(self) -> tuple[float, float, float]:
        c = self.config
        return (
            c.scale_emb,
            c.scale_depth / c.num_hidden_layers**0.5,
            c.dim_model_base / c.hidden_size,
        )
