"""Medusa heads on the CPU: a step graph for each, on rows that the model's steps gave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lmi_core import _native
from lmi_core.models.medusa_heads import MedusaHeads, record_head
from lmi_core.runners.cpu.draft_chains import DraftChains
from lmi_core.runners.step_memory import StepMemory, StepSizes
from lmi_core.weights.formats import FloatArray

if TYPE_CHECKING:
    from lmi_core.models.loader import LoadedModel
    from lmi_core.ops.graph import Graph
    from lmi_core.ops.operands import LinearWeight
    from lmi_core.settings.engine_config import EngineConfig


class MedusaRunner(DraftChains):
    """Implements ``HeadRunner`` beside the runner of the model that it drafts for. Weights are
    int8, and what they are multiplied with is rounded so: drafts need no more."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        heads: MedusaHeads,
        sizes: StepSizes,
        shared: StepMemory,
    ) -> None:
        """``sizes``, ``shared``: of the steps of ``model``."""
        self.num_heads = heads.num_heads
        rows = config.max_num_seqs
        super().__init__(config, sizes, shared, max_num_tokens=rows, num_steps=self.num_heads)
        self.states: FloatArray = np.zeros((rows, model.spec.hidden_size), np.float32)
        self._model = model
        self.num_bytes = self.states.nbytes
        self.graphs = [self._graph(heads, head) for head in range(heads.num_heads)]
        self.arena_bytes = sum(graph.arena_bytes for graph in self.graphs)

    def graph_of(self, step_id: int) -> _native.Graph:
        return self.graphs[step_id]

    def _graph(self, heads: MedusaHeads, head: int) -> _native.Graph:
        from lmi_core.ops.graph import Graph

        recorded = Graph("fp32")
        self._record(recorded, heads, head)
        return self._new_graph(recorded)

    def _record(self, graph: Graph, heads: MedusaHeads, head: int) -> None:
        from lmi_core import ops

        norm, spec = self._model.weights.final_norm, self._model.spec.norm
        x = ops.gather_logit_rows(ops.embed(graph, self.states))
        if norm is not None:
            x = ops.norm(x, norm.weight, norm.bias, spec.eps, kind=spec.kind, out_dtype="fp32")
        record_head(x, heads, head, self._packed)

    def _packed(self, matrix: FloatArray) -> LinearWeight:
        from lmi_core.ops.cpu import NativeWeights

        weights = NativeWeights(self._config.instruction_set, num_threads=1)
        packed = weights.pack([matrix], format="int8", gated=False)
        self.num_bytes += packed.num_bytes
        return packed
