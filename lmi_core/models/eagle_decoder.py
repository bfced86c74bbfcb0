"""An EAGLE head's layer as the decoder records it, and what of the model it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from lmi_core import ops
from lmi_core.models.decoder import Decoder, KeptStates
from lmi_core.models.eagle_head import EagleHead
from lmi_core.models.weights import DecoderWeights, LayerWeights, Linear, Norm, WeightPacker
from lmi_core.ops import Graph, Handle, KvCache
from lmi_core.ops.kept_rows import StatesTable
from lmi_core.weights.formats import FloatArray

if TYPE_CHECKING:
    from lmi_core.models.loader import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleWeights:
    """A head's, packed: int8, but for what reads states as they are."""

    decoder: DecoderWeights
    token_norm: Norm | None
    """Of tokens' rows, of EAGLE-3, by which they come to ``token_linear``."""
    token_linear: Linear
    """From a token: to queries, keys and values, of EAGLE-3, or to the layer's stream."""
    state_linear: Linear | None
    """From a state to that stream."""
    token_ids: npt.NDArray[np.int32] | None

    @property
    def num_bytes(self) -> int:
        state_bytes = 0 if self.state_linear is None else self.state_linear.num_bytes
        return self.decoder.num_bytes + self.token_linear.num_bytes + state_bytes


def pack_eagle(head: EagleHead, model: LoadedModel, packer: WeightPacker) -> EagleWeights:
    """The weights of a head for ``model``, whose embedding and head it has where its files have
    none."""

    def pack(*parts: FloatArray, gated: bool = False) -> Linear:
        return Linear(packer.pack(parts, format="int8", gated=gated))

    def plain(matrix: FloatArray, bias: FloatArray | None) -> Linear:
        parts = [_stored(matrix, model.dtype)]
        return Linear(packer.pack(parts, format=model.dtype, gated=False), bias)

    def norm(name: str) -> Norm:
        return Norm(head.of_layer(name))

    hidden, is_third = head.spec.hidden_size, bool(head.reads_layers)
    projections = [head.of_layer(f"self_attn.{part}_proj.weight") for part in "qkv"]
    biases = head.bias(*(f"{head.prefix}self_attn.{part}_proj" for part in "qkv"))
    qkv = Linear(pack(*(np.ascontiguousarray(p[:, -hidden:]) for p in projections)).weight, biases)
    output = pack(head.of_layer("self_attn.o_proj.weight"))
    gate_up = [head.of_layer(f"mlp.{part}_proj.weight") for part in ("gate", "up")]
    has_norm = head.has(f"{head.prefix}input_layernorm.weight")
    own_norm = "hidden_norm.weight" if is_third else "input_layernorm.weight"
    layer = LayerWeights(
        attention_norm=norm(own_norm) if is_third or has_norm else None,
        qkv=qkv,
        q_norm=None,
        k_norm=None,
        attention_output=Linear(output.weight, head.bias(f"{head.prefix}self_attn.o_proj")),
        mlp_norm=norm("post_attention_layernorm.weight"),
        gate_up=pack(*gate_up, gated=True),
        down=pack(head.of_layer("mlp.down_proj.weight")),
        experts=None,
    )
    own_table = "embed_tokens.weight"
    decoder = DecoderWeights(
        embedding=_stored(head.read(own_table), model.dtype)
        if head.has(own_table)
        else model.weights.embedding,
        layers=(layer,),
        final_norm=Norm(head.read("norm.weight")) if is_third else None,
        head=pack(head.read("lm_head.weight"))
        if head.has_head
        else model.whole_head or model.weights.head,
    )
    if is_third:
        firsts = [np.ascontiguousarray(p[:, :hidden]) for p in projections]
        return EagleWeights(
            decoder=decoder,
            token_norm=norm("input_layernorm.weight"),
            token_linear=pack(*firsts),
            state_linear=None,
            token_ids=head.token_ids,
        )
    fusion = head.read("fc.weight")
    return EagleWeights(
        decoder=decoder,
        token_norm=None,
        token_linear=plain(np.ascontiguousarray(fusion[:, :hidden]), head.bias("fc")),
        state_linear=plain(np.ascontiguousarray(fusion[:, hidden:]), None),
        token_ids=None,
    )


def kept_states(
    head: EagleHead,
    dtype: Literal["fp32", "bf16"],
    table: StatesTable,
    packer: WeightPacker,
) -> KeptStates:
    """What the model of a head keeps for it in ``table``, of the act dtype. EAGLE-3's are fused by
    the model's steps, since the head goes on in what that gives."""
    if not head.reads_layers:
        return KeptStates(table, (), ())
    matrices = np.split(head.read("fc.weight"), len(head.reads_layers), axis=1)
    packed = [
        packer.pack([_stored(np.ascontiguousarray(m), dtype)], format=dtype, gated=False)
        for m in matrices
    ]
    biases = [head.bias("fc")] + [None] * (len(packed) - 1)
    linears = tuple(Linear(weight, bias) for weight, bias in zip(packed, biases, strict=True))
    return KeptStates(table, head.reads_layers, linears)


def _stored(matrix: FloatArray, dtype: str) -> npt.NDArray[np.generic]:
    """As files have them that were made of it; bf16 by its upper bits, to which it was widened."""
    if dtype == "fp32":
        return matrix
    bits = matrix.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


class EagleDecoder(Decoder):
    """A row at a position is of the token behind it and the model's state there."""

    def __init__(
        self,
        head: EagleHead,
        weights: EagleWeights,
        states: StatesTable,
        cache: KvCache,
        max_model_len: int,
    ) -> None:
        """``states``: by slot, of the model and of the head itself."""
        super().__init__(head.spec, weights.decoder, cache, max_model_len)
        self._head = head
        self._weights = weights
        self._states = states

    def record(self, graph: Graph) -> Handle:
        weights, layer = self._weights, self.weights.layers[0]
        tokens = self._normed(ops.embed(graph, self.weights.embedding), weights.token_norm)
        x = ops.kept_rows(graph, self._states)
        projected = self._linear(tokens, weights.token_linear)
        if weights.state_linear is not None:
            x = self._linear(self._normed(x, None), weights.state_linear, residual=projected)
            x = self._layer(x, layer, 0)
        else:
            x = self._fused_layer(x, projected, layer)
        x = ops.gather_logit_rows(x)
        ops.keep_rows(x, self._states)
        return self._record_logits(x)

    def _fused_layer(self, x: Handle, projected: Handle, layer: LayerWeights) -> Handle:
        """EAGLE-3's: queries, keys and values are of a token and a state."""
        if self._head.norms_residual:
            x = self._stream_normed(x, layer.attention_norm)
            h = self._normed(x, None)
        else:
            h = self._normed(x, layer.attention_norm)
        x = self._attention(x, h, layer, 0, projected)
        return self._mlp(x, self._normed(x, layer.mlp_norm), layer, 0)

    def _logits(self, x: Handle, head: Linear) -> Handle:
        logits = super()._logits(x, head)
        ids = self._weights.token_ids
        return logits if ids is None else ops.spread_columns(logits, ids, self.spec.vocab_size)
