"""Medusa heads on the CPU: a step graph for each, on rows that the model's steps gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lmi_core import _native
from lmi_core.models.medusa_heads import MedusaHeads
from lmi_core.runners.step_memory import NUM_STEPS, StepMemory, StepSizes
from lmi_core.weights.formats import FloatArray

if TYPE_CHECKING:
    from lmi_core.models.loader import LoadedModel
    from lmi_core.ops.graph import Graph, Handle, LinearWeight
    from lmi_core.settings.engine_config import EngineConfig


class MedusaRunner:
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
        self.vocab_size = sizes.vocab_size
        self.max_model_len = sizes.max_model_len
        self.max_num_tokens = config.max_num_seqs
        self.num_heads = heads.num_heads
        self.states: FloatArray = np.zeros(
            (config.max_num_seqs, model.spec.hidden_size), np.float32
        )
        self.worker: _native.Worker | None = None
        """Once there is one."""
        self._model = model
        self._config = config
        self.num_bytes = self.states.nbytes
        self.graphs = [self._graph(heads, head) for head in range(heads.num_heads)]
        self._chains = tuple(
            tuple(self._step(shared) for _ in self.graphs) for _ in range(NUM_STEPS - 1)
        )
        self._next_chain = 0

    def _graph(self, heads: MedusaHeads, head: int) -> _native.Graph:
        from lmi_core.ops.cpu import lower
        from lmi_core.ops.graph import Graph

        config = self._config
        graph = _native.Graph(
            max_tokens=config.max_num_seqs,
            max_seqs=config.max_num_seqs,
            max_logit_rows=config.max_num_seqs,
            max_blocks_per_seq=-(-self.max_model_len // config.block_size),
            block_size=config.block_size,
            act_dtype="fp32",
            instruction_set=config.instruction_set,
        )
        recorded = Graph("fp32")
        self._record(recorded, heads, head)
        lower(recorded, graph)
        graph.finish()
        return graph

    def _record(self, graph: Graph, heads: MedusaHeads, head: int) -> None:
        from lmi_core import ops

        norm, spec = self._model.weights.final_norm, self._model.spec.norm
        x = ops.gather_logit_rows(ops.embed(graph, self.states))
        if norm is not None:
            x = ops.norm(x, norm.weight, norm.bias, spec.eps, kind=spec.kind, out_dtype="fp32")
        for weight, bias in heads.blocks(head):
            y = ops.linear(self._plain(x), self._packed(weight), bias=bias)
            y = ops.activation(y, "silu")
            x = ops.norm(y, None, None, 0.0, kind="none", residual=x)
        ops.sample(ops.linear(self._plain(x), self._packed(heads.output(head))))

    def _plain(self, x: Handle) -> Handle:
        from lmi_core import ops

        return ops.norm(x, None, None, 0.0, kind="none")

    def _packed(self, matrix: FloatArray) -> LinearWeight:
        from lmi_core.ops.cpu import NativeWeights

        weights = NativeWeights(self._config.instruction_set, num_threads=1)
        packed = weights.pack([matrix], format="int8", gated=False)
        self.num_bytes += packed.num_bytes
        return packed

    def _step(self, shared: StepMemory) -> _native.Step:
        config = self._config
        return _native.Step(
            max_tokens=config.max_num_seqs,
            max_seqs=config.max_num_seqs,
            max_logit_rows=config.max_num_seqs,
            max_logprobs=0,
            max_copies=1,
            block_size=config.block_size,
            block_tables=shared.block_tables,
            sampling=shared.sampling,
        )

    def next_steps(self) -> tuple[_native.Step, ...]:
        steps = self._chains[self._next_chain]
        self._next_chain = (self._next_chain + 1) % len(self._chains)
        return steps

    def submit(self, steps: Sequence[_native.Step]) -> None:
        assert self.worker is not None, "submit before the worker is there"
        for graph, step in zip(self.graphs, steps, strict=False):
            self.worker.submit(graph, step, -1)
