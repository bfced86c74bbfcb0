"""What a family of models is: a way to read its configuration and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lmi_core.models.rope_config import rope_spec, scaled_max_positions
from lmi_core.models.spec import Activation, AttentionSpec, DecoderSpec
from lmi_core.weights.hf_config import HfConfig

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Checkpoint names of our weights; those of a layer follow ``layer`` with its index filled in.

    Linear layers are named without ``.weight`` and ``.bias``. ``ignored`` are endings of tensors
    that older checkpoints carry and that are computed instead.
    """

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head"
    layer: str = "model.layers.{layer}."
    attention_norm: str = "input_layernorm.weight"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    attention_output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm.weight"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family as data: how its config.json reads, and what its tensors are called."""

    name: str
    architectures: tuple[str, ...]
    read_spec: Callable[[HfConfig], DecoderSpec]
    names: WeightNames = field(default_factory=WeightNames)


def attention_spec(
    config: HfConfig,
    *,
    num_kv_heads: int,
    head_dim: int,
    windows: tuple[int, ...] = (),
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
) -> AttentionSpec:
    """Attention with the usual scale; ``windows`` empty: every layer sees everything."""
    num_q_heads = config.integer("num_attention_heads")
    if num_q_heads % num_kv_heads != 0:
        raise config.error(
            "num_key_value_heads", f"is {num_kv_heads}, which doesn't divide {num_q_heads} heads"
        )
    return AttentionSpec(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        windows=windows or (0,) * config.num_layers,
    )


def decoder_spec(
    config: HfConfig,
    family: str,
    attention: AttentionSpec,
    *,
    max_positions: int,
    mlp_bias: bool = False,
) -> DecoderSpec:
    """The rest of the spec, which all families spell alike; ``max_positions`` is the family's
    default where config.json has none."""
    name = config.string("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise config.error("hidden_act", f"is {name!r}; supported: {', '.join(_ACTIVATIONS)}")
    positions = config.integer("max_position_embeddings", max_positions)
    rope = rope_spec(config, attention.head_dim, positions)
    return DecoderSpec(
        architecture=config.architecture,
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.num_layers,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        activation=_ACTIVATIONS[name],
        attention=attention,
        rope=rope,
        tied_head=config.boolean("tie_word_embeddings", False),
        mlp_bias=mlp_bias,
        max_positions=scaled_max_positions(rope, positions),
    )


def head_dim(config: HfConfig, default: int | None = None) -> int:
    """``head_dim``, or ``default``, or the hidden size divided by the number of heads."""
    value = config.optional_integer("head_dim", default)
    if value is not None:
        return value
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % heads != 0:
        raise config.error("head_dim", f"is absent, and {heads} heads don't divide {hidden}")
    return hidden // heads


def layer_windows(config: HfConfig) -> tuple[int, ...]:
    """Windows as Qwen states them: ``layer_types`` if given, else the layers from
    ``max_window_layers`` on; none unless ``use_sliding_window``."""
    num_layers = config.num_layers
    window = config.optional_integer("sliding_window", 4096)
    if not config.boolean("use_sliding_window", False) or window is None:
        return (0,) * num_layers
    types = config.values.get("layer_types")
    if types is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    by_type = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or not {*types} <= {*by_type}:
        raise config.error(
            "layer_types", f"must list {num_layers} of {', '.join(by_type)}; found {types!r}"
        )
    return tuple(by_type[name] for name in types)
