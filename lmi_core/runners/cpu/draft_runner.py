"""A draft model on the CPU: its part of the KV blocks, its step graph and its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmi_core import _native
from lmi_core.runners.cpu.cpu_model import make_cache
from lmi_core.runners.cpu.draft_chains import DraftChains
from lmi_core.runners.draft_steps import draft_rows, most_drafts
from lmi_core.runners.step_memory import StepMemory, StepSizes

if TYPE_CHECKING:
    from lmi_core.models.loader import LoadedModel
    from lmi_core.settings.engine_config import EngineConfig


class CpuDraftRunner(DraftChains):
    """Implements ``DraftRunner`` beside the runner of the model that it drafts for."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        sizes: StepSizes,
        shared: StepMemory,
    ) -> None:
        """``config``: what the draft model was loaded with; ``sizes``, ``shared``: of the steps of
        the model that it drafts for."""
        from lmi_core.models.decoder import record
        from lmi_core.ops.graph import Graph

        rows, depth = draft_rows(config), most_drafts(config)
        super().__init__(config, sizes, shared, max_num_tokens=rows, num_steps=depth)
        spec = model.spec
        self.model = model
        self.vocab_size = spec.vocab_size
        self.max_model_len = min(spec.max_positions, sizes.max_model_len)
        self.num_bytes = model.weights.num_bytes
        num_blocks = shared.pool.num_blocks
        self.cache = make_cache(config, spec, model.dtype, num_blocks, model.kv_scales)
        recorded = Graph(model.dtype)
        record(model, recorded, self.cache, self.max_model_len)
        self.graph = self._new_graph(recorded)
        self.arena_bytes = self.graph.arena_bytes

    def graph_of(self, step_id: int) -> _native.Graph:
        return self.graph
