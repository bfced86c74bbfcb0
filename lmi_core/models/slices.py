"""What one rank of a model has of its weights, and over which slices sums are taken.

Outputs of qkv, of gate and up, and of the head are cut between ranks, and the inputs of what reads
them. The sum over inputs that were cut goes over ``num_slices`` slices, as a tree of neighbours:
with a fixed number its bits don't depend on how many ranks there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lmi_core.errors import UserError
from lmi_core.models.spec import DecoderSpec, LayerLinear, LinearSource, RowIds

if TYPE_CHECKING:
    from lmi_core.settings.engine_config import EngineConfig

INVARIANT_SLICES = 4
"""Of sums that don't depend on the degree, where a model's heads allow it; else 2."""
_UNITS = (128, 64, 32, 16, 8, 4, 2)
"""Inputs that stay together, as many as leave nearly equal slices: groups of quantised weights are
as large at most."""
_VOCAB_UNITS = (64, 16)
_DEGREE = "tensor_parallel_degree"

Bounds = tuple[tuple[int, int], ...]


class SlicedLinear(NamedTuple):
    """What a rank has of one of a layer's linears."""

    source: LinearSource
    """Of the whole linear."""
    rows: RowIds | None = None
    """Of its outputs, in our order; None: all of them."""
    inputs: Bounds | None = None
    """Of each slice; None: all of them, as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """``num_slices`` is a multiple of ``num_ranks``; neighbouring slices are one rank's."""

    num_ranks: int = 1
    rank: int = 0
    num_slices: int = 1
    ranks_per_kv_head: int = 1
    """Neighbours that have the same head of keys and values."""

    @property
    def num_own(self) -> int:
        """This rank's slices."""
        return self.num_slices // self.num_ranks

    def own(self, bounds: Bounds) -> Bounds:
        """This rank's of all slices' bounds."""
        return bounds[self.rank * self.num_own : (self.rank + 1) * self.num_own]

    def inner(self, size: int) -> Bounds:
        """The slices of an MLP's inner size, of all ranks."""
        return cut(size, self.num_slices, _unit(size, self.num_slices))

    def vocabulary(self, size: int) -> tuple[int, int]:
        """The tokens whose logits this rank computes."""
        unit = next((unit for unit in _VOCAB_UNITS if size // unit >= self.num_ranks), 1)
        return cut(size, self.num_ranks, unit)[self.rank]

    def q_heads(self, num_heads: int) -> tuple[int, int]:
        each = num_heads // self.num_ranks
        return self.rank * each, (self.rank + 1) * each

    def kv_heads(self, num_heads: int) -> tuple[int, int]:
        """One that several ranks have where there are more ranks than heads."""
        if num_heads < self.num_ranks:
            first = self.rank * num_heads // self.num_ranks
            return first, first + 1
        return self.q_heads(num_heads)

    def spec(self, spec: DecoderSpec) -> DecoderSpec:
        """What this rank computes of a model."""
        attention = spec.attention
        first, end = self.q_heads(attention.num_q_heads)
        first_kv, end_kv = self.kv_heads(attention.num_kv_heads)
        return replace(
            spec,
            attention=replace(
                attention,
                num_q_heads=end - first,
                num_kv_heads=end_kv - first_kv,
                slopes=attention.slopes[first:end],
            ),
        )

    def linears(
        self, spec: DecoderSpec, sources: Mapping[LayerLinear, LinearSource]
    ) -> dict[LayerLinear, SlicedLinear]:
        """This rank's of a layer's ``sources``, of the whole model, which ``spec`` is of."""
        inner = sources[LayerLinear.DOWN].num_inputs if LayerLinear.DOWN in sources else 0
        num_heads = spec.attention.num_q_heads
        return {
            linear: SlicedLinear(
                source,
                self._rows(spec, linear, source, inner),
                self._inputs(linear, source, num_heads),
            )
            for linear, source in sources.items()
        }

    def _qkv_rows(self, spec: DecoderSpec) -> RowIds:
        """Outputs of the whole model's qkv, in our order, that this rank has."""
        attention = spec.attention
        size, kv_size = attention.head_dim, attention.kv_size
        q = np.arange(*(size * head for head in self.q_heads(attention.num_q_heads)))
        k = np.arange(*(size * head for head in self.kv_heads(attention.num_kv_heads)))
        return np.concatenate([q, attention.q_size + k, attention.q_size + kv_size + k])

    def _rows(
        self, spec: DecoderSpec, linear: LayerLinear, source: LinearSource, inner: int
    ) -> RowIds | None:
        if self.num_ranks == 1 or linear in (LayerLinear.ATTENTION_OUTPUT, LayerLinear.DOWN):
            return None
        if linear == LayerLinear.QKV:
            return self._qkv_rows(spec)
        return self.inner_rows(inner, num_parts=source.num_outputs // inner)

    def inner_rows(self, inner: int, num_parts: int) -> RowIds:
        """Of so many parts, one after the other, with ``inner`` outputs each."""
        bounds = self.own(self.inner(inner))
        own = np.arange(bounds[0][0], bounds[-1][1])
        return np.concatenate([own + part * inner for part in range(num_parts)])

    def _inputs(self, linear: LayerLinear, source: LinearSource, num_heads: int) -> Bounds | None:
        if self == WHOLE or linear not in (LayerLinear.ATTENTION_OUTPUT, LayerLinear.DOWN):
            return None
        if linear == LayerLinear.DOWN:
            return self.own(self.inner(source.num_inputs))
        return self.own(cut(source.num_inputs, self.num_slices, source.num_inputs // num_heads))


WHOLE = Slicing()


def cut(size: int, num_parts: int, unit: int) -> Bounds:
    """Nearly equal parts of whole units; the last one ends at ``size``."""
    num_units = -(-size // unit)
    ends = [min(size, num_units * i // num_parts * unit) for i in range(num_parts + 1)]
    return tuple(itertools.pairwise(ends))


def _unit(size: int, num_slices: int) -> int:
    def is_even(unit: int) -> bool:
        return size % (unit * num_slices) == 0 or size // unit >= 8 * num_slices

    possible = [unit for unit in _UNITS if size // unit >= num_slices] or [1]
    return next(filter(is_even, possible), possible[-1])


def slicing_of(asked: EngineConfig, spec: DecoderSpec) -> Slicing:
    """The slices of a model, of which rank 0 has the first. Raises UserError for a degree that it
    can't be cut for."""
    degree = asked.tensor_parallel_degree
    is_invariant = asked.tp_invariant and asked.device == "cpu"
    num_slices = _invariant_slices(spec) if is_invariant else degree
    if num_slices == 1:
        return WHOLE
    allowed = [n for n in range(1, 65) if _divides(n, spec)]
    if is_invariant:
        allowed = [n for n in allowed if num_slices % n == 0]
    if degree not in allowed:
        attention = spec.attention
        sums = f", and tp_invariant sums over {num_slices} slices" if is_invariant else ""
        raise UserError(
            f"{_DEGREE}={degree} doesn't divide the model: it has {attention.num_q_heads} "
            f"attention heads, {attention.num_kv_heads} of keys and values, and MLPs of "
            f"{_least_inner(spec)}{sums}; allowed are "
            f"{', '.join(map(str, allowed))}",
            field=_DEGREE,
        )
    return Slicing(
        num_ranks=degree,
        num_slices=num_slices,
        ranks_per_kv_head=max(1, degree // spec.attention.num_kv_heads),
    )


def _invariant_slices(spec: DecoderSpec) -> int:
    heads = spec.attention.num_q_heads
    return next((n for n in (INVARIANT_SLICES, 2) if heads % n == 0), 1)


def _divides(degree: int, spec: DecoderSpec) -> bool:
    attention = spec.attention
    kv_heads = attention.num_kv_heads
    shares = kv_heads % degree == 0 or degree % kv_heads == 0
    return attention.num_q_heads % degree == 0 and shares and _least_inner(spec) >= 2 * degree


def _least_inner(spec: DecoderSpec) -> int:
    sizes = [spec.intermediate_size]
    if spec.experts is not None:
        sizes = [spec.experts.intermediate_size, spec.experts.shared_size or spec.hidden_size]
        sizes += [spec.intermediate_size] * (False in spec.experts.sparse)
    return min(sizes)
