"""The decoder's linears, and the modules of a checkpoint that they are made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from lmi_core.models.spec import DecoderSpec
from lmi_core.models.weight_names import QkvLayout

RowIds = npt.NDArray[np.int64]
CODEGEN_SHARDS = 4
"""Each of a quarter of the heads."""


class LayerLinear(IntEnum):
    """The linears of a layer, in order; GATE_UP is up alone where nothing is gated."""

    QKV = 0
    ATTENTION_OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


@dataclass(frozen=True, slots=True)
class LinearSource:
    """Modules whose outputs, one after the other, are those of one of our linears."""

    modules: tuple[tuple[str, int], ...]
    """Names within the layer, and outputs."""
    num_inputs: int
    bias: bool
    rows: RowIds | None = None
    """The checkpoint's output for each of ours; None: as they are."""

    @property
    def num_outputs(self) -> int:
        return sum(size for _, size in self.modules)

    def module_rows(self, first: int, size: int) -> RowIds | None:
        """``rows`` of the module with these outputs; no row leaves its module."""
        return None if self.rows is None else self.rows[first : first + size] - first


def layer_linears(spec: DecoderSpec, layer_id: int) -> dict[LayerLinear, LinearSource]:
    """Of a layer, but for latent attention's and experts'. One that all tokens take unscaled is an
    MLP."""
    attention, names = spec.attention, spec.names
    hidden = spec.hidden_size
    qkv: tuple[tuple[str, int], ...] = (
        (names.q, attention.q_size),
        (names.k, attention.kv_size),
        (names.v, attention.kv_size),
    )
    if names.qkv:
        qkv = ((names.qkv, attention.q_size + 2 * attention.kv_size),)
    linears = {}
    if attention.latent is None:
        rows = _qkv_rows(spec)
        linears[LayerLinear.QKV] = LinearSource(qkv, hidden, attention.qkv_bias, rows)
    return linears | {
        LayerLinear.ATTENTION_OUTPUT: LinearSource(
            ((names.attention_output, hidden),), attention.output_size, attention.output_bias
        ),
        **_mlp_linears(spec, layer_id),
    }


def latent_linears(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of latent attention's modules in a layer, but for what makes keys and
    values of a latent; nothing where attention is another."""
    latent, hidden = spec.attention.latent, spec.hidden_size
    if latent is None:
        return {}
    names, q_size = latent.names, spec.attention.num_q_heads * (latent.nope_dim + latent.rope_dim)
    found = {names.kv_a: (latent.kv_rank + latent.rope_dim, hidden)}
    if latent.q_rank:
        return found | {names.q_a: (latent.q_rank, hidden), names.q_b: (q_size, latent.q_rank)}
    return found | {names.q: (q_size, hidden)}


def _mlp_linears(spec: DecoderSpec, layer_id: int) -> dict[LayerLinear, LinearSource]:
    names, inner = spec.names, spec.intermediate_size
    gate, up, down = names.gate, names.up, names.down
    experts = spec.experts
    if experts is not None and experts.sparse[layer_id]:
        if not experts.shared_size or experts.gates_shared:
            return {}
        inner = experts.shared_size
        gate, up = experts.names.shared_gate, experts.names.shared_up
        down = experts.names.shared_down
    modules: tuple[tuple[str, int], ...] = ((up, inner),)
    if names.gate_up and gate == names.gate:
        modules = ((names.gate_up, 2 * inner),)
    elif gate:
        modules = ((gate, inner), *modules)
    return {
        LayerLinear.GATE_UP: LinearSource(modules, spec.hidden_size, spec.mlp_bias),
        LayerLinear.DOWN: LinearSource(((down, spec.hidden_size),), inner, spec.mlp_bias),
    }


def rotate_half_order(spec: DecoderSpec) -> RowIds | None:
    """The checkpoint's dimension of a head for each of ours; None: the same."""
    if not spec.attention.interleaved:
        return None
    rotary_dim = max(rope.rotary_dim for rope in spec.ropes)
    pairs = np.arange(rotary_dim).reshape(-1, 2)
    return np.concatenate([pairs.T.ravel(), np.arange(rotary_dim, spec.attention.head_dim)])


def _qkv_rows(spec: DecoderSpec) -> RowIds | None:
    attention, order = spec.attention, rotate_half_order(spec)
    layout = spec.names.qkv_layout
    if order is None and layout == "blocks":
        return None
    heads = (attention.num_q_heads, attention.num_kv_heads, attention.num_kv_heads)
    parts = _heads(layout, heads, attention.head_dim)
    if order is not None:
        parts = [parts[0][:, order], parts[1][:, order], parts[2]]
    return np.concatenate([part.ravel() for part in parts])


def _heads(layout: QkvLayout, heads: tuple[int, int, int], head_dim: int) -> list[RowIds]:
    """Rows [heads, head_dim] of queries, keys and values in a fused tensor."""
    num_q, num_kv, _ = heads
    rows = np.arange(sum(heads) * head_dim)
    if layout == "grouped":
        groups = rows.reshape(num_kv, -1, head_dim)
        parts = [groups[:, :-2], groups[:, -2], groups[:, -1]]
    elif layout == "codegen":
        shards = rows.reshape(CODEGEN_SHARDS, 3, -1, head_dim)
        parts = [shards[:, 0], shards[:, 2], shards[:, 1]]
    else:
        parts = np.split(rows, [num_q * head_dim, (num_q + num_kv) * head_dim])
    return [part.reshape(-1, head_dim) for part in parts]
