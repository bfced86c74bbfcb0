"""What a family of models is: a way to read its configuration and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lmi_core.models.pooling import PoolingSpec
from lmi_core.models.pooling_head import HeadLayer
from lmi_core.models.rope import rope_spec, scaled_max_positions
from lmi_core.models.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    ExpertSpec,
    NormSpec,
    RopeSpec,
)
from lmi_core.weights.hf_config import HfConfig, UnsupportedSettingError

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
_OTHER_ACTIVATIONS = frozenset(
    [
        "gelu_10",
        "gelu_accurate",
        "gelu_python",
        "gelu_python_tanh",
        "hardswish",
        "laplace",
        "leaky_relu",
        "linear",
        "mish",
        "prelu",
        "quick_gelu",
        "relu6",
        "sigmoid",
        "sqrtsoftplus",
        "tanh",
        "xielu",
    ]
)
"""Those that Transformers has besides."""
NO_ROPE = RopeSpec(rotary_dim=2, kind="none")
_MAX_HEADS_SIZE = 1 << 20
"""Of all heads together, whose rows are put into order before tensors are compared with it."""


def last_token_classifier(spec: DecoderSpec, config: HfConfig) -> tuple[HeadLayer, ...]:
    """That of decoders."""
    return (HeadLayer("score", 1, spec.hidden_size, bias=False),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family as data: how its config.json reads, and what its tensors are called."""

    name: str
    read_spec: Callable[[HfConfig], DecoderSpec]
    keys: Mapping[str, str] = field(default_factory=dict)
    """What its config.json calls keys that others call otherwise."""

    classifier: Callable[[DecoderSpec, HfConfig], tuple[HeadLayer, ...]] = last_token_classifier
    """The layers that score what is pooled, where the checkpoint is a classifier."""

    def pooled(self, spec: DecoderSpec, config: HfConfig, pooling: PoolingSpec) -> DecoderSpec:
        """As ``spec``, of a model that pools."""
        is_classifier = pooling.task == "rerank" and pooling.answers is None
        return replace(
            spec,
            has_head=False,
            head_layers=self.classifier(spec, config) if is_classifier else (),
            logit_scale=1.0,
            max_positions=min(spec.max_positions, pooling.max_tokens or spec.max_positions),
        )


def attention_spec(
    config: HfConfig,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    windows: tuple[int, ...] = (),
    scale: float = 0.0,
    bias: bool | str = False,
    **changes: Any,
) -> AttentionSpec:
    """``windows`` empty: every layer sees everything. ``scale``: 0: the usual one. ``bias``: of all
    its linears, or the key that says so. ``changes``: fields of the spec."""
    has_bias = config.boolean(bias) if isinstance(bias, str) else bias
    num_q_heads = config.integer("num_attention_heads")
    if num_kv_heads is None:
        num_kv_heads = config.integer("num_key_value_heads", num_q_heads)
    if head_dim is None:
        head_dim = config.head_dim()
    if num_q_heads % num_kv_heads != 0:
        raise config.error(
            "num_key_value_heads", f"is {num_kv_heads}, which doesn't divide {num_q_heads} heads"
        )
    if head_dim % 2:
        raise config.error("head_dim", f"is {head_dim}, of a head, but must be even")
    if num_q_heads * head_dim > _MAX_HEADS_SIZE:
        raise config.error(
            "num_attention_heads",
            f"is {num_q_heads}, of {head_dim} numbers each, more than {_MAX_HEADS_SIZE} together",
        )
    spec = AttentionSpec(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=scale or head_dim**-0.5,
        qkv_bias=has_bias,
        output_bias=has_bias,
        windows=windows or (0,) * config.num_layers,
    )
    return replace(spec, **changes)


def decoder_spec(
    config: HfConfig,
    family: str,
    attention: AttentionSpec,
    *,
    max_positions: int,
    ropes: tuple[RopeSpec, ...] = (),
    partial_rotary: float = 1.0,
    theta: float = 10000.0,
    activation: str = "silu",
    tied: bool = False,
    **changes: Any,
) -> DecoderSpec:
    """The rest of the spec, which all families spell alike. ``max_positions``, ``partial_rotary``,
    ``theta``, ``activation`` and ``tied`` are the family's defaults where config.json has none;
    ``ropes``, of layers, are read where there are none and positions are neither learned nor
    ALiBi's; ``changes``: fields of the spec."""
    norm = changes.pop("norm", None) or norm_spec(config)
    name = config.get("hidden_act") or activation
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        error = config.error("hidden_act", f"is {name!r}; supported: {', '.join(_ACTIVATIONS)}")
        if isinstance(name, str) and name in _OTHER_ACTIVATIONS:
            raise UnsupportedSettingError(str(error), field=error.field)
        raise error
    positions = config.integer("max_position_embeddings", max_positions)
    spec = DecoderSpec(
        architecture=config.architecture,
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=changes.pop("intermediate_size", None)
        or config.integer("intermediate_size"),
        num_layers=config.num_layers,
        norm=norm,
        activation=_ACTIVATIONS[name],
        attention=attention,
        ropes=ropes,
        tied_head=config.boolean("tie_word_embeddings", tied),
        max_positions=positions,
    )
    if attention.slopes or "num_positions" in changes:
        ropes = (NO_ROPE,) * spec.num_layers
    if not ropes:
        rope = rope_spec(
            config,
            attention.head_dim,
            positions,
            partial_default=partial_rotary,
            theta_default=theta,
        )
        ropes = (rope,) * spec.num_layers
    longest = max(scaled_max_positions(rope, positions) for rope in ropes)
    names = changes.get("names", spec.names)
    gated = bool(names.gate or names.gate_up)
    return replace(spec, **{"ropes": ropes, "max_positions": longest, "gated": gated, **changes})


def expert_spec(
    config: HfConfig,
    *,
    num_experts: int,
    top_k: int,
    intermediate_size: int | None = None,
    num_dense: int = 0,
    **changes: Any,
) -> ExpertSpec:
    """Mixtures of experts in all layers but the first ``num_dense``. ``num_experts``, ``top_k`` and
    ``intermediate_size``, of an expert, are the family's where config.json has none; ``changes``:
    fields of the spec."""
    spec = ExpertSpec(
        num_experts=config.integer("num_experts", num_experts),
        top_k=config.integer("num_experts_per_tok", top_k),
        intermediate_size=config.integer("moe_intermediate_size", intermediate_size),
        sparse=tuple(i >= num_dense for i in range(config.num_layers)),
    )
    usual = config.values.get("num_experts")
    if usual not in (None, spec.num_experts):
        problem = f"is {spec.num_experts}, but num_experts beside it is {usual!r}: leave one out"
        raise config.error("num_experts", problem)
    if spec.top_k > spec.num_experts:
        raise config.error(
            "num_experts_per_tok", f"is {spec.top_k}, but there are {spec.num_experts} experts"
        )
    spec = replace(spec, **changes)
    _check_groups(config, spec)
    return spec


def _check_groups(config: HfConfig, spec: ExpertSpec) -> None:
    """Raise ModelError unless a token's experts can come from the best groups."""
    group_size, rest = divmod(spec.num_experts, spec.num_groups)
    if rest:
        raise config.error(
            "n_group", f"is {spec.num_groups}, which doesn't divide {spec.num_experts} experts"
        )
    if spec.top_groups > spec.num_groups:
        raise config.error(
            "topk_group", f"is {spec.top_groups}, but there are {spec.num_groups} groups"
        )
    if spec.top_k > group_size * spec.top_groups:
        raise config.error(
            "num_experts_per_tok",
            f"is {spec.top_k}, but {spec.top_groups} of {spec.num_groups} groups have {group_size} "
            "experts each",
        )


def alibi_slopes(num_heads: int, most: float = 8.0) -> tuple[float, ...]:
    """Of heads (arXiv 2108.12409): powers ``most`` i / n of 1/2, where n is the largest power of
    two, then every other one of twice as many."""
    whole = 1 << (num_heads.bit_length() - 1)
    rest = range(1, 2 * (num_heads - whole), 2)
    powers = [most * i / whole for i in range(1, whole + 1)]
    powers += [most * i / (2 * whole) for i in rest]
    return tuple(2.0**-power for power in powers)


def norm_spec(config: HfConfig, *, eps: float = 1e-6, **changes: Any) -> NormSpec:
    """``eps``: where config.json has none; ``changes``: fields of the spec."""
    return replace(NormSpec(eps=config.number("rms_norm_eps", eps)), **changes)


def layer_windows(config: HfConfig) -> tuple[int, ...]:
    """Windows as Qwen states them: ``layer_types`` if given, else the layers from
    ``max_window_layers`` on; none unless ``use_sliding_window``."""
    num_layers = config.num_layers
    if not config.boolean("use_sliding_window", False):
        return (0,) * num_layers
    window = config.optional_integer("sliding_window", 4096)
    if window is None:
        return (0,) * num_layers
    if config.values.get("layer_types") is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    return tuple(window if local else 0 for local in local_layers(config, 1))


def local_layers(config: HfConfig, period: int, first: int = -1) -> tuple[bool, ...]:
    """Which layers see a window: as ``layer_types`` says, else all but every ``period``-th, counted
    from layer ``first``, which may lie before layer 0."""
    num_layers, types = config.num_layers, config.values.get("layer_types")
    if types is None:
        return tuple((layer - first) % period != 0 for layer in range(num_layers))
    known = {"full_attention", "sliding_attention"}
    if not isinstance(types, list) or len(types) != num_layers or not {*types} <= known:
        raise config.error(
            "layer_types",
            f"must list {num_layers} of {', '.join(sorted(known))}; found {types!r}",
        )
    return tuple(name == "sliding_attention" for name in types)


def local_windows(config: HfConfig, local: tuple[bool, ...], default: int) -> tuple[int, ...]:
    """``sliding_window``, or ``default`` where it is absent, of local layers."""
    window = config.optional_integer("sliding_window", default) or 0
    return tuple(window if is_local else 0 for is_local in local)


def ropes_by_type(
    config: HfConfig,
    attention: AttentionSpec,
    local: tuple[bool, ...],
    max_positions: int,
    *,
    thetas: tuple[float, float],
) -> tuple[RopeSpec, ...]:
    """Of layers, where ``rope_parameters`` differs by type. In older files ``rope_theta`` and
    ``rope_scaling`` are those of global layers, and ``rope_local_base_freq`` is the theta of
    local ones. ``thetas``, of local and global ones, are the family's where the file has none."""
    positions = config.integer("max_position_embeddings", max_positions)
    if config.values.get("rope_parameters") is None:
        theta = config.get("rope_theta", thetas[1])
        local_theta = config.get("rope_local_base_freq", config.get("rope_theta", thetas[0]))
        by_type = {
            "full_attention": {**config.settings("rope_scaling"), "rope_theta": theta},
            "sliding_attention": {"rope_theta": local_theta},
        }
        rest = {key: value for key, value in config.values.items() if key != "rope_scaling"}
        config = replace(config, values={**rest, "rope_parameters": by_type})
    by_local = {
        is_local: rope_spec(
            config,
            attention.head_dim,
            positions,
            layer_type="sliding_attention" if is_local else "full_attention",
            theta_default=thetas[0 if is_local else 1],
        )
        for is_local in (True, False)
        if is_local in local
    }
    return tuple(by_local[is_local] for is_local in local)
