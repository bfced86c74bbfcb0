"""A model's layers quantised one after the other, each on what those before it then give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from lmi_core.calibration.layer_runs import LayerRuns, Observer
from lmi_core.models.expert_tensors import bias_beside, expert_mlps
from lmi_core.models.smoothing import LayerFactors, Share, layer_factors
from lmi_core.models.spec import LayerLinear, LinearSource, latent_linears, layer_linears
from lmi_core.models.weights import bias_name
from lmi_core.quantize.awq import Sample, best_factors
from lmi_core.quantize.experts import KeptRows
from lmi_core.quantize.formats import Format, Measured, Method
from lmi_core.quantize.gptq import Hessian
from lmi_core.quantize.importance import MeanSquares
from lmi_core.quantize.stored import Stored, rounded_to, to_stored
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.matrix import as_floats
from lmi_core.weights.safetensors_file import TensorInfo


class Gathered(Protocol):
    """What is kept of the rows that a linear reads."""

    def add(self, rows: FloatArray) -> None: ...
    def measured(self) -> Measured:
        """What ``Format.make`` wants of them."""
        ...


_GATHERED: Mapping[Method, Callable[[], Gathered]] = {
    "gptq": Hessian,
    "ordered gptq": partial(Hessian, by_size=True),
    "awq": Sample,
    "importance": MeanSquares,
}


@dataclass(slots=True)
class MadeLayer:
    """What is written of a layer, and what that costs."""

    tensors: dict[str, Stored] = field(default_factory=dict)
    """Those that aren't as in the checkpoint, by name."""
    replaced: dict[str, FloatArray] = field(default_factory=dict)
    """The weights, norms and biases that they stand for."""
    loss: float = 0.0
    """The squared change of what the layer adds to its stream, relative to that."""


class Quantizer:
    """Takes ``streams`` through the layers of ``runs`` and makes each of ``format``."""

    def __init__(
        self,
        runs: LayerRuns,
        tensors: Mapping[str, TensorInfo],
        format: Format,
        streams: list[FloatArray],
    ) -> None:
        self._runs = runs
        self._tensors = tensors
        self._format = format
        self._streams = streams

    def layers(self) -> Iterator[MadeLayer]:
        """Each layer, in order."""
        for layer_id in range(self._runs.spec.num_layers):
            yield self._layer(layer_id)

    def _layer(self, layer_id: int) -> MadeLayer:
        runs = self._runs
        seen, observe = self._observers()
        is_sparse = runs.spec.experts is not None and runs.spec.experts.sparse[layer_id]
        kept_rows = KeptRows(sum(len(stream) for stream in self._streams))

        def observe_all(linear: LayerLinear, rows: FloatArray) -> None:
            if is_sparse:
                kept_rows.observe(linear, rows)
            observe(linear, rows)

        weights = runs.load(layer_id)
        is_measured = self._format.method != "nearest"
        exact = runs.run(layer_id, weights, self._streams, observe_all if is_measured else None)
        del weights
        floats = self._floats(layer_id)
        made = MadeLayer()
        factors = LayerFactors()
        if self._format.method == "awq":
            factors = self._fold(layer_id, floats, self._chosen(layer_id, floats, seen), made)
        for linear, source in layer_linears(runs.spec, layer_id).items():
            measured = seen[linear].measured() if linear in seen else None
            for name in self._names(layer_id, source):
                smoothed = floats.pop(name)
                if (columns := factors.columns.get(linear)) is not None:
                    smoothed = smoothed * columns
                self._make(name, smoothed, measured, made)
        self._make_latent(layer_id, seen.get(LayerLinear.QKV), made)
        if is_sparse:
            self._make_experts(layer_id, seen.get(LayerLinear.GATE_UP), kept_rows, made)
        rounded = runs.run(layer_id, runs.load(layer_id, made.replaced), self._streams)
        made.loss = _relative(exact, rounded, self._streams)
        self._streams = rounded
        return made

    def _make(self, name: str, weights: FloatArray, measured: Measured, made: MadeLayer) -> None:
        stored, kept = self._format.make(name, weights, measured)
        module = name.removesuffix("weight")
        made.tensors |= {module + suffix: each for suffix, each in stored.items()}
        made.replaced[name] = kept

    def _make_latent(self, layer_id: int, read: Gathered | None, made: MadeLayer) -> None:
        """Of latent attention. What reads the queries' latent isn't measured."""
        spec, reader = self._runs.spec, self._runs.reader
        prefix = spec.names.layer.format(layer=layer_id)
        latent = spec.attention.latent
        for name in latent_linears(spec):
            (weights,) = as_floats([reader.matrix(f"{prefix}{name}.weight")])
            reads_stream = latent is not None and name != latent.names.q_b
            measured = read.measured() if read is not None and reads_stream else None
            self._make(f"{prefix}{name}.weight", weights, measured, made)

    def _make_experts(
        self, layer_id: int, read: Gathered | None, rows: KeptRows, made: MadeLayer
    ) -> None:
        """Of a mixture, whose MLPs all ``read`` the same."""
        spec, reader = self._runs.spec, self._runs.reader
        assert spec.experts is not None
        prefix = spec.names.layer.format(layer=layer_id)
        measured = None if read is None else read.measured()
        for modules in expert_mlps(spec.experts):
            names = [prefix + name for name in modules]
            *ups, down = as_floats([reader.matrix(name) for name in names])
            own = None
            if read is not None:
                biases = [reader.vector(bias_beside(n)) for n in names[:-1] * spec.experts.bias]
                own = _GATHERED[self._format.method]()
                own.add(rows.behind(ups, biases, spec.experts.activation or spec.activation))
            if isinstance(own, Sample):
                assert self._format.grid is not None
                factors = best_factors(down, own, self._format.grid, lambda numbers: numbers)
                ups[-1], down = ups[-1] / factors[:, None], down * factors
            behind = None if own is None else own.measured()
            all_measured = [*[measured] * len(ups), behind]
            for name, weights, of_inputs in zip(names, (*ups, down), all_measured, strict=True):
                self._make(name, weights, of_inputs, made)

    def _observers(self) -> tuple[dict[LayerLinear, Gathered], Observer]:
        """What each linear's inputs are gathered in, by the method."""
        seen: dict[LayerLinear, Gathered] = {}

        def observe(linear: LayerLinear, rows: FloatArray) -> None:
            if linear not in seen:
                seen[linear] = _GATHERED[self._format.method]()
            seen[linear].add(rows)

        return seen, observe

    def _names(self, layer_id: int, source: LinearSource) -> list[str]:
        prefix = self._runs.spec.names.layer.format(layer=layer_id)
        return [f"{prefix}{name}.weight" for name, _ in source.modules]

    def _floats(self, layer_id: int) -> dict[str, FloatArray]:
        """The layer's matrices [outputs, inputs] by name."""
        reader = self._runs.reader
        floats = {}
        for source in layer_linears(self._runs.spec, layer_id).values():
            for name in self._names(layer_id, source):
                (floats[name],) = as_floats([reader.matrix(name)])
        return floats

    def _chosen(
        self,
        layer_id: int,
        floats: Mapping[str, FloatArray],
        seen: Mapping[LayerLinear, Gathered],
    ) -> LayerFactors:
        """AWQ's factors."""
        sources = layer_linears(self._runs.spec, layer_id)

        def choose(linears: tuple[LayerLinear, ...], share: Share) -> FloatArray | None:
            if linears[0] not in sources:
                return None  # experts are in its place
            names = [name for each in linears for name in self._names(layer_id, sources[each])]
            sample, grid = seen[linears[0]], self._format.grid
            assert isinstance(sample, Sample)
            assert grid is not None
            weights = np.concatenate([floats[name] for name in names])
            return best_factors(weights, sample, grid, share)

        return layer_factors(self._runs.spec, layer_id, choose)

    def _fold(
        self,
        layer_id: int,
        floats: dict[str, FloatArray],
        chosen: LayerFactors,
        made: MadeLayer,
    ) -> LayerFactors:
        """Put the division into norms, which are rounded as they are stored, and into rows and
        their biases; returns the factors that columns get for exactly that."""
        spec, names = self._runs.spec, self._runs.spec.names
        prefix = names.layer.format(layer=layer_id)
        columns = dict(chosen.columns)
        for norm, linear in (
            (names.attention_norm, LayerLinear.QKV),
            (names.mlp_norm, LayerLinear.GATE_UP),
        ):
            if linear not in columns or not norm:
                continue
            if not spec.norm.has_weight:
                del columns[linear]
            else:
                columns[linear] = self._fold_norm(prefix + norm, columns[linear], made)
        if spec.parallel and not names.mlp_norm and LayerLinear.QKV in columns:
            columns[LayerLinear.GATE_UP] = columns[LayerLinear.QKV]
        for linear, divisors in chosen.rows.items():
            source = layer_linears(spec, layer_id)[linear]
            of_stored = np.empty_like(divisors)
            of_stored[slice(None) if source.rows is None else source.rows] = divisors
            first = 0
            for name, (_, size) in zip(self._names(layer_id, source), source.modules, strict=True):
                own = of_stored[first : first + size]
                floats[name] = floats[name] / own[:, None]
                if source.bias:
                    self._replace(bias_name(name), self._vector(bias_name(name)) / own, made)
                first += size
        return LayerFactors(columns, chosen.rows)

    def _fold_norm(self, name: str, factors: FloatArray, made: MadeLayer) -> FloatArray:
        offset = np.float32(self._runs.spec.norm.offset)
        old = self._vector(name) + offset
        new = self._replace(name, old / factors - offset, made) + offset
        if self._runs.spec.norm.bias:
            self._replace(bias_name(name), self._vector(bias_name(name)) / factors, made)
        is_used = (old != 0) & (new != 0)
        return np.where(is_used, old / np.where(is_used, new, 1), factors).astype(np.float32)

    def _vector(self, name: str) -> FloatArray:
        return self._runs.reader.vector(name)

    def _replace(self, name: str, values: FloatArray, made: MadeLayer) -> FloatArray:
        dtype = self._tensors[name].dtype
        made.tensors[name] = to_stored(values, dtype)
        made.replaced[name] = rounded_to(values, dtype)
        return made.replaced[name]


def _relative(
    exact: list[FloatArray], rounded: list[FloatArray], before: list[FloatArray]
) -> float:
    changes = [float(((a - b) ** 2).sum()) for a, b in zip(exact, rounded, strict=True)]
    gains = [float(((a - b) ** 2).sum()) for a, b in zip(exact, before, strict=True)]
    return sum(changes) / max(sum(gains), 1e-30)
