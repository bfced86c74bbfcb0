"""Which tensors of a checkpoint a GGUF file's are made of, under which names and in which order.

Format: llama.cpp's converters; ``lmi_core/models/gguf_spec.py`` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lmi_core.models.expert_tensors import down_names, gate_up_names
from lmi_core.models.latent_attention import keys_and_values
from lmi_core.models.spec import (
    DecoderSpec,
    ExpertSpec,
    LatentSpec,
    LayerLinear,
    LinearSource,
    RowIds,
    layer_linears,
)
from lmi_core.models.weight_names import WeightNames
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.gguf.architectures import INTERLEAVED

_SPLIT = ("baichuan", "internlm2")
"""Architectures whose files have queries, keys and values apart, whatever the checkpoint has."""


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor of the file: rows of ``sources``, one after the other."""

    name: str
    sources: tuple[str, ...]
    layer_id: int = -1
    rows: RowIds | None = None
    """The rows that are wanted, in this order; None: all."""
    is_matrix: bool = True
    """In the type of its mix; else fp32."""
    added: float = 0.0
    """To its numbers."""
    num_stacked: int = 0
    """Matrices that are one tensor of three dimensions; 0: it has two, or one."""
    shape: tuple[int, ...] = ()
    """(): the sources say it."""
    made: Callable[[FloatArray], FloatArray] | None = None
    """Of a source's numbers those of ``shape``; None: they are as they are."""

    def assemble(self, parts: Sequence[npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
        """``parts``: the sources' rows, as numbers or as blocks."""
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return whole if self.rows is None else np.ascontiguousarray(whole[self.rows])

    @property
    def part(self) -> str:
        """Of a layer: the name of the linear."""
        return self.name.split(".")[2] if self.layer_id >= 0 else ""


def targets(spec: DecoderSpec, architecture: str, tensors: Mapping[str, object]) -> list[Target]:
    """All tensors of the file, in order; ``tensors``: those of the checkpoint."""
    names = spec.names
    found = [Target("token_embd.weight", (names.embedding,))]
    for ours, name in (
        ("position_embd.weight", names.positions),
        ("token_embd_norm.weight", names.embedding_norm),
        ("output_norm.weight", names.final_norm),
    ):
        found += [Target(ours, (name,), is_matrix=False)] if name else []
    if not spec.tied_head:
        found.append(Target("output.weight", (f"{names.head}.weight",)))
    for layer_id in range(spec.num_layers):
        for target in _layer(spec, architecture, layer_id):
            prefix = names.layer.format(layer=layer_id)
            found.append(
                replace(
                    target,
                    name=f"blk.{layer_id}.{target.name}",
                    sources=tuple(prefix + source for source in target.sources),
                    layer_id=layer_id,
                )
            )
    found = [target for target in found if all(source in tensors for source in target.sources)]
    biases = [bias for target in found if (bias := _bias(target, tensors)) is not None]
    return [_with_offset(target, spec.norm.offset) for target in found] + biases


def _bias(target: Target, tensors: Mapping[str, object]) -> Target | None:
    """That of a linear or a norm."""
    sources = tuple(f"{name.removesuffix('weight')}bias" for name in target.sources)
    if not target.name.endswith(".weight") or not all(name in tensors for name in sources):
        return None
    name = f"{target.name.removesuffix('weight')}bias"
    return replace(target, name=name, sources=sources, is_matrix=False)


def _with_offset(target: Target, offset: float) -> Target:
    is_norm = target.name.endswith("norm.weight") and not target.is_matrix
    return replace(target, added=offset) if offset and is_norm else target


def _layer(spec: DecoderSpec, architecture: str, layer_id: int) -> Iterator[Target]:
    linears = layer_linears(spec, layer_id)
    for name, source in _norms(spec.names, architecture).items():
        yield Target(name, (source,), is_matrix=False)
    if spec.attention.latent is not None:
        yield from _latent(spec.attention.latent, spec.attention.num_q_heads)
    else:
        yield from _qkv(spec, architecture, linears[LayerLinear.QKV])
    (output, _), *_ = linears[LayerLinear.ATTENTION_OUTPUT].modules
    yield Target("attn_output.weight", (f"{output}.weight",))
    experts, end = spec.experts, ""
    if experts is not None and experts.sparse[layer_id]:
        yield from _experts(experts)
        end = "_shexp"
    if LayerLinear.GATE_UP in linears:
        modules = [name for name, _ in linears[LayerLinear.GATE_UP].modules]
        parts = ("gate", "up") if len(modules) == 2 else ("up",)
        (down, _), *_ = linears[LayerLinear.DOWN].modules
        for part, module in zip((*parts, "down"), (*modules, down), strict=True):
            yield Target(f"ffn_{part}{end}.weight", (f"{module}.weight",))


def _norms(names: WeightNames, architecture: str) -> dict[str, str]:
    """What is no matrix, by its name in the file."""
    first, second = "attn_norm.weight", "ffn_norm.weight"
    if architecture == "falcon" and names.mlp_norm:
        first, second = "attn_norm_2.weight", first
    if architecture in ("glm4moe", "gpt-oss"):
        second = "post_attention_norm.weight"
    found = (
        (first, names.attention_norm),
        (second, names.mlp_norm),
        ("attn_q_norm.weight", names.q_norm),
        ("attn_k_norm.weight", names.k_norm),
        ("post_attention_norm.weight", names.attention_post_norm),
        ("post_ffw_norm.weight", names.mlp_post_norm),
        ("attn_sinks.weight", names.sinks),
    )
    return {ours: name for ours, name in found if name}


def _qkv(spec: DecoderSpec, architecture: str, source: LinearSource) -> Iterator[Target]:
    order = _file_order(spec, architecture, source)
    sources = tuple(f"{name}.weight" for name, _ in source.modules)
    if len(sources) == 1 and architecture not in _SPLIT:
        yield Target("attn_qkv.weight", sources, rows=order)
        return
    attention, first = spec.attention, 0
    for i, size in enumerate((attention.q_size, attention.kv_size, attention.kv_size)):
        rows = None if order is None else order[first : first + size]
        own = sources
        if len(sources) == 3:
            own, rows = (sources[i],), None if rows is None else rows - first
        elif rows is None:
            rows = np.arange(first, first + size)
        yield Target(f"attn_{'qkv'[i]}.weight", own, rows=rows)
        first += size


def _latent(latent: LatentSpec, num_heads: int) -> Iterator[Target]:
    """Keys are made of queries by matrices of their own, as are values."""
    names = latent.names
    yield Target("attn_kv_a_mqa.weight", (f"{names.kv_a}.weight",))
    yield Target("attn_kv_a_norm.weight", (names.kv_a_norm,), is_matrix=False)
    if latent.q_rank:
        yield Target("attn_q_a.weight", (f"{names.q_a}.weight",))
        yield Target("attn_q_a_norm.weight", (names.q_a_norm,), is_matrix=False)
        yield Target("attn_q_b.weight", (f"{names.q_b}.weight",))
    else:
        yield Target("attn_q.weight", (f"{names.q}.weight",))
    rank = latent.kv_rank
    for i, (name, shape) in enumerate(
        (
            ("attn_k_b.weight", (num_heads, rank, latent.nope_dim)),
            ("attn_v_b.weight", (num_heads, latent.value_dim, rank)),
        )
    ):
        yield Target(
            name,
            names.kv_b,
            shape=shape,
            made=lambda kv_b, i=i: keys_and_values([kv_b], latent, num_heads)[i],  # type: ignore[misc]
        )


def _file_order(spec: DecoderSpec, architecture: str, source: LinearSource) -> RowIds | None:
    """The checkpoint's row for each of the file's; None: the same."""
    attention = spec.attention
    is_interleaved = attention.interleaved or architecture in INTERLEAVED
    if not is_interleaved:
        return source.rows
    rows = np.arange(source.num_outputs) if source.rows is None else source.rows
    rotary_dim = max(rope.rotary_dim for rope in spec.ropes)
    pairs = np.arange(rotary_dim).reshape(2, -1).T.ravel()
    order = np.concatenate([pairs, np.arange(rotary_dim, attention.head_dim)])
    num_heads = attention.num_q_heads + attention.num_kv_heads
    heads = rows[: num_heads * attention.head_dim].reshape(num_heads, -1)[:, order]
    return np.concatenate([heads.ravel(), rows[num_heads * attention.head_dim :]])


def _experts(experts: ExpertSpec) -> Iterator[Target]:
    names = experts.names
    yield Target("ffn_gate_inp.weight", (f"{names.router}.weight",), is_matrix=False)
    if experts.choice_bias:
        yield Target("exp_probs_b.bias", (names.choice_bias,), is_matrix=False)
    if experts.gates_shared:
        router = f"{names.shared_router}.weight"
        yield Target("ffn_gate_inp_shexp.weight", (router,), is_matrix=False)
        for part, name in (
            ("gate", names.shared_gate),
            ("up", names.shared_up),
            ("down", names.shared_down),
        ):
            yield Target(f"ffn_{part}_shexp.weight", (f"{name}.weight",))
    gate_up, count = gate_up_names(experts), experts.num_experts
    stacks = {"gate": gate_up[::2], "up": gate_up[1::2], "down": down_names(experts)}
    for part, sources in stacks.items():
        yield Target(f"ffn_{part}_exps.weight", tuple(sources), num_stacked=count)
