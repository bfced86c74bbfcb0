"""EAGLE heads: what a checkpoint of one has, and whether it fits the model that it is for.

A head is one layer of a decoder that reads a token beside the model's hidden state before it, and
gives the state that the model will have there, so that it goes on from its own (Li et al., 2024).
EAGLE-3's state is made of those that three of the model's layers read (Li et al., 2025), and its
output matrix may have the likeliest tokens alone: ``d2t`` says by how much a token's id is above
its row's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lmi_core.errors import ModelError
from lmi_core.models.families.llama import FAMILY
from lmi_core.models.head_tensors import check_heads, num_weights, read_floats
from lmi_core.models.spec import DecoderSpec
from lmi_core.weights.checkpoint import Checkpoint
from lmi_core.weights.float_tensors import read_array
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.hf_config import HfConfig
from lmi_core.weights.safetensors_file import TensorInfo

_FUSION, _IDS, _MASK = "fc.weight", "d2t", "t2d"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_LAYERS = ("midlayer.", "layers.0.")
_BIASED = ("fc", *(f"self_attn.{part}_proj" for part in "qkvo"))
_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHead:
    """Of a directory whose headers were checked."""

    path: Path
    spec: DecoderSpec
    """Of its one layer, with the model's vocabulary."""
    reads_layers: tuple[int, ...]
    """Of the model, whose inputs are fused to a state; as many as it has layers: what is behind the
    last. Empty: its last state, normed, is one (EAGLE-1)."""
    norms_residual: bool
    """Whether the layer adds to its state as it is normed."""
    prefix: str
    """Of the layer's tensors."""
    tensors: Mapping[str, TensorInfo]
    token_ids: npt.NDArray[np.int32] | None
    """Of its output's rows, ascending; None: it has all tokens."""

    @property
    def num_weights(self) -> int:
        """Of all matrices."""
        return num_weights(self.tensors)

    @property
    def description(self) -> str:
        return f"an EAGLE{'-3' if self.reads_layers else ''} head of {self.path}"

    @property
    def has_head(self) -> bool:
        """Whether its output head is its own, not the model's."""
        return self.has(_HEAD)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str) -> FloatArray:
        return read_floats(self.tensors[name])

    def of_layer(self, name: str) -> FloatArray:
        return self.read(self.prefix + name)

    def bias(self, *names: str) -> FloatArray | None:
        """Of linears that are one, one after the other: fp32 [outputs]; None: they have none."""
        if not self.has(f"{names[0]}.bias"):
            return None
        return np.concatenate([self.read(f"{name}.bias") for name in names])


def has_eagle_head(checkpoint: Checkpoint) -> bool:
    """Whether it is of such a head, as its tensors say."""
    try:
        return _FUSION in _tensors(checkpoint)
    except ModelError:  # who reads it as a model says so
        return False


def find_eagle_head(checkpoint: Checkpoint, target: DecoderSpec) -> EagleHead:
    """Check all but the weights of the head in ``checkpoint`` for the model of ``target``. Raises
    ModelError, naming settings and tensors that don't fit."""
    config, tensors = _layer_config(checkpoint.config, target), _tensors(checkpoint)
    prefix = next((p for p in _LAYERS if any(n.startswith(p) for n in tensors)), _LAYERS[0])
    is_third = any(name in tensors for name in (f"{prefix}hidden_norm.weight", _IDS, _MASK))
    for name in ("norm_before_fc", "fc_norm"):
        config.require(name, False)
    config.require("num_hidden_layers", 1)
    spec = replace(FAMILY.read_spec(config), vocab_size=target.vocab_size)
    layers = _aux_layers(config, target) if is_third else ()
    expected = _shapes(spec, target, tensors, prefix, layers)
    place = next(iter(tensors.values())).path
    own = (prefix, "fc", "layers.", "midlayer.")
    unknown = sorted(n for n in tensors if n.startswith(own) and n not in expected)
    if unknown:
        raise ModelError(
            f"{place} has {unknown[0]}, which no head has that is known here: one layer of Llama's "
            "kind, of EAGLE or EAGLE-3",
            field=place.name,
        )
    return EagleHead(
        path=checkpoint.path,
        spec=spec,
        reads_layers=layers,
        norms_residual=config.boolean("norm_before_residual"),
        prefix=prefix,
        tensors=check_heads(place, tensors, expected, target),
        token_ids=_token_ids(place, tensors, target.vocab_size) if is_third else None,
    )


def _tensors(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    return {name.removeprefix("model."): tensor for name, tensor in checkpoint.tensors.items()}


def _layer_config(config: HfConfig, target: DecoderSpec) -> HfConfig:
    """As of a Llama model; speculators' files have the layer's settings in an object of their
    own."""
    inner: dict[str, Any] = config.values.get("transformer_layer_config") or {}
    values = {"vocab_size": target.vocab_size, **config.values, **inner}
    return replace(config, values=values | {"architectures": ["LlamaForCausalLM"]})


def _aux_layers(config: HfConfig, target: DecoderSpec) -> tuple[int, ...]:
    """Ids in ``eagle_config`` are of the layers that give what is read, others of those that read
    it; where there are none, the second, the middle and the third but last, as at first."""
    nested = config.values.get("eagle_config")
    inner = nested.get(_AUX_LAYERS) if isinstance(nested, dict) else None
    last = target.num_layers
    default = [min(2, last), last // 2, max(0, last - 3)]
    given = inner or config.values.get(_AUX_LAYERS) or default
    is_list = isinstance(given, list) and all(type(i) is int for i in given)
    ids = [i + 1 for i in given] if is_list and inner else given
    if not is_list or not all(0 <= i <= last for i in ids):
        raise config.error(_AUX_LAYERS, f"is {given!r:.80}; the model has {last} layers")
    return tuple(ids)


def _shapes(
    spec: DecoderSpec,
    target: DecoderSpec,
    tensors: Mapping[str, TensorInfo],
    prefix: str,
    layers: tuple[int, ...],
) -> dict[str, tuple[int, ...]]:
    hidden, inner, attention = spec.hidden_size, spec.intermediate_size, spec.attention
    q_size = attention.num_q_heads * attention.head_dim
    kv_size = attention.num_kv_heads * attention.head_dim
    read = 2 * hidden if layers else hidden
    of_layer = {
        "self_attn.q_proj.weight": (q_size, read),
        "self_attn.k_proj.weight": (kv_size, read),
        "self_attn.v_proj.weight": (kv_size, read),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "post_attention_layernorm.weight": (hidden,),
    }
    if layers:
        of_layer |= {"hidden_norm.weight": (hidden,)}
    if layers or f"{prefix}input_layernorm.weight" in tensors:
        of_layer |= {"input_layernorm.weight": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {prefix + n: shape for n, shape in of_layer.items()}
    shapes[_FUSION] = (hidden, len(layers) * target.hidden_size if layers else 2 * hidden)
    if _EMBEDDING in tensors or hidden != target.hidden_size:
        shapes[_EMBEDDING] = (target.vocab_size, hidden)
    if layers:
        num_rows = tensors[_IDS].shape[0] if _IDS in tensors else target.vocab_size
        shapes |= {"norm.weight": (hidden,), _HEAD: (num_rows, hidden)}
    elif hidden != target.hidden_size:
        shapes[_HEAD] = (target.vocab_size, hidden)
    biased = [name if name == "fc" else prefix + name for name in _BIASED]
    given = [name for name in biased if f"{name}.bias" in tensors]
    return shapes | {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in given}


def _token_ids(
    place: Path, tensors: Mapping[str, TensorInfo], vocab_size: int
) -> npt.NDArray[np.int32] | None:
    mask = tensors.get(_MASK)
    if mask is not None and mask.shape != (vocab_size,):
        raise ModelError(
            f"{place} is for a vocabulary of {mask.shape} tokens ({_MASK}), not of {vocab_size}",
            field=place.name,
        )
    if _IDS not in tensors:
        return None
    tensor = tensors[_IDS]
    if tensor.dtype not in ("I64", "I32") or len(tensor.shape) != 1 or not tensor.shape[0]:
        raise ModelError(f"{place}: {_IDS} is {tensor.dtype} {list(tensor.shape)}", field=_IDS)
    above = read_array(tensor).astype(np.int64)
    ids = above + np.arange(len(above))
    if ids[0] < 0 or ids[-1] >= vocab_size or (np.diff(ids) <= 0).any():
        raise ModelError(
            f"{place}: {_IDS} doesn't name ascending ids below {vocab_size}", field=_IDS
        )
    return ids.astype(np.int32)
