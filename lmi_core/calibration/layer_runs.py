"""A model run layer by layer on the CPU engine, with what each of its linears reads.

Only one layer's weights are in memory. A layer is recorded as a step graph of its own, in fp32; the
stream that it reads stands in for the embedding, a row for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmi_core import _native, ops
from lmi_core.models.decoder import Decoder
from lmi_core.models.found_model import FoundModel
from lmi_core.models.loader import load_decoder, load_layer
from lmi_core.models.smoothing import LayerFactors
from lmi_core.models.spec import LayerLinear
from lmi_core.models.tensor_reader import Progress, TensorReader
from lmi_core.models.weight_packing import WeightPacking
from lmi_core.models.weights import LayerWeights
from lmi_core.ops import Graph, Handle
from lmi_core.ops.cpu import NativeWeights, lower
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.matrix import Matrix

MAX_TOKENS = 512
"""Of a sequence, which is one step."""
_BLOCK_SIZE = 16
Observer = Callable[[LayerLinear, FloatArray], None]
"""Called with what a linear reads [tokens, inputs], which is valid during the call."""


class ReplacedReader(TensorReader):
    """A ``TensorReader`` to which matrices and vectors may be given that it takes instead of the
    file's."""

    replaced: Mapping[str, FloatArray] = {}

    def matrix(self, name: str) -> Matrix:
        found = self.replaced.get(name)
        return super().matrix(name) if found is None else found

    def vector(self, name: str) -> FloatArray:
        found = self.replaced.get(name)
        return super().vector(name) if found is None else found


class _LayerDecoder(Decoder):
    """Records a decoder's parts one by one, and which values its linears read."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.read: dict[LayerLinear, Handle] = {}

    def embedded(self, graph: Graph) -> Handle:
        return self._embedded(graph)

    def layer(self, x: Handle, weights: LayerWeights, layer_id: int) -> Handle:
        self.read = {}
        return self._layer(x, weights, layer_id)

    def _attention(self, x: Handle, h: Handle, *given: Any) -> Handle:
        self.read[LayerLinear.QKV] = h
        return super()._attention(x, h, *given)

    def _mlp(self, x: Handle, h: Handle, layer: LayerWeights, layer_id: int) -> Handle:
        self.read[LayerLinear.GATE_UP] = h  # experts read the same
        return super()._mlp(x, h, layer, layer_id)

    def _add(self, x: Handle, h: Handle, *given: Any) -> Handle:
        self.read[given[-1]] = h
        return super()._add(x, h, *given)


class LayerRuns:
    """Sequences of up to ``max_tokens`` tokens, taken through the layers of ``found``."""

    def __init__(
        self,
        found: FoundModel,
        *,
        instruction_set: str = "",
        num_threads: int = 0,
        progress: Progress | None = None,
    ) -> None:
        spec = found.spec
        self.spec = spec
        self.max_tokens = min(MAX_TOKENS, spec.max_positions)
        self._instruction_set = instruction_set
        packer = NativeWeights(instruction_set, num_threads)
        self.reader = ReplacedReader(found, WeightPacking(packer, "fp32", None), progress)
        headless = replace(spec, has_head=False)
        without_layers = load_decoder(self.reader, headless, (), fuses_gate=True)
        num_blocks = -(-self.max_tokens // _BLOCK_SIZE)
        attention = spec.attention
        self._cache = _native.KvCache(
            num_layers=spec.num_cache_layers,
            num_blocks=num_blocks,
            block_size=_BLOCK_SIZE,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            dtype="fp32",
            is_latent=attention.latent is not None,
        )
        self._decoder = _LayerDecoder(spec, without_layers, self._cache, self.max_tokens)
        self._worker = _native.Worker(num_threads or _native.num_physical_cores())
        tables = _native.BlockTables(1, num_blocks)
        tables.set(0, list(range(num_blocks)))
        self._step = _native.Step(
            max_tokens=self.max_tokens,
            max_seqs=1,
            max_logit_rows=1,
            max_logprobs=0,
            max_copies=0,
            block_size=_BLOCK_SIZE,
            block_tables=tables,
            sampling=_native.SamplingTable(1, max(spec.vocab_size, self.max_tokens)),
        )

    def close(self) -> None:
        self._worker.close()

    def embedded(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """The stream [tokens, hidden] that the first layer reads of each sequence."""
        graph = Graph("fp32")
        native, (stream,) = self._lowered(graph, [self._decoder.embedded(graph)])
        return [self._run(native, [stream], ids)[0] for ids in sequences]

    def load(self, layer_id: int, replaced: Mapping[str, FloatArray] | None = None) -> LayerWeights:
        """A layer's weights; ``replaced``: matrices [outputs, inputs] by their names, which aren't
        the checkpoint's."""
        self.reader.replaced = replaced or {}
        return load_layer(self.reader, self.spec, layer_id, LayerFactors(), fuses_gate=True)

    def run(
        self,
        layer_id: int,
        weights: LayerWeights,
        streams: Sequence[FloatArray],
        observe: Observer | None = None,
    ) -> list[FloatArray]:
        """The stream [tokens, hidden] of each sequence behind the layer, of those before it."""
        graph = Graph("fp32")
        table = np.zeros((self.max_tokens, self.spec.hidden_size), np.float32)
        x = self._decoder.layer(ops.embed(graph, table), weights, layer_id)
        read = self._decoder.read if observe is not None else {}
        native, handles = self._lowered(graph, [x, *read.values()])
        results = []
        for stream in streams:
            table[: len(stream)] = stream
            after, *inputs = self._run(native, handles, range(len(stream)))
            results.append(after)
            for linear, rows in zip(read, inputs, strict=True):
                assert observe is not None
                observe(linear, rows)
        return results

    def _lowered(
        self, graph: Graph, wanted: Sequence[Handle]
    ) -> tuple[_native.Graph, list[_native.Handle]]:
        native = _native.Graph(
            max_tokens=self.max_tokens,
            max_seqs=1,
            max_logit_rows=1,
            max_blocks_per_seq=-(-self.max_tokens // _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
            act_dtype="fp32",
            instruction_set=self._instruction_set,
        )
        values = lower(graph, native)
        handles = [values[handle] for handle in wanted]
        for handle in handles:
            native.output(handle)
        native.finish()
        return native, handles

    def _run(
        self, graph: _native.Graph, handles: Sequence[_native.Handle], ids: Sequence[int]
    ) -> list[FloatArray]:
        self._step.clear()
        self._step.add(list(ids), 0, 0, -1, "none")
        self._worker.run(graph, self._step)
        return [np.array(graph.read(handle, len(ids))) for handle in handles]
