"""An EAGLE head on the CPU: its part of the KV blocks, and the states that it goes on from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lmi_core import _native
from lmi_core.models.eagle_decoder import EagleDecoder, kept_states, pack_eagle
from lmi_core.models.eagle_head import EagleHead
from lmi_core.ops.cpu import NativeWeights
from lmi_core.runners.cpu.core_groups import num_rank_threads
from lmi_core.runners.cpu.cpu_model import make_cache
from lmi_core.runners.cpu.draft_chains import DraftChains
from lmi_core.runners.draft_steps import draft_rows, most_drafts
from lmi_core.runners.step_memory import StepMemory, StepSizes

if TYPE_CHECKING:
    from lmi_core.models.decoder import KeptStates
    from lmi_core.models.loader import LoadedModel
    from lmi_core.settings.engine_config import EngineConfig


def eagle_states(
    config: EngineConfig, model: LoadedModel, head: EagleHead, num_blocks: int
) -> KeptStates:
    """What the steps of ``model`` keep for its head."""
    weights = NativeWeights(config.instruction_set, num_rank_threads(config))
    shape = num_blocks * config.block_size, head.spec.hidden_size
    table = np.zeros(shape, np.float32 if model.dtype == "fp32" else np.uint16)
    return kept_states(head, model.dtype, table, weights)


class EagleRunner(DraftChains):
    """Implements ``DraftRunner`` beside the runner of the model that it drafts for."""

    def __init__(
        self,
        config: EngineConfig,
        model: LoadedModel,
        head: EagleHead,
        kept: KeptStates,
        sizes: StepSizes,
        shared: StepMemory,
    ) -> None:
        """``sizes``, ``shared``: of the steps of ``model``, which keep ``kept``."""
        from lmi_core.ops.graph import Graph

        rows, depth = draft_rows(config), most_drafts(config)
        super().__init__(config, sizes, shared, max_num_tokens=rows, num_steps=depth)
        self.shift = 1
        self.cache = make_cache(config, head.spec, model.dtype, shared.pool.num_blocks)
        packer = NativeWeights(config.instruction_set, num_rank_threads(config))
        weights = pack_eagle(head, model, packer)
        self.num_bytes = weights.num_bytes + sum(linear.num_bytes for linear in kept.linears)
        self.decoder = EagleDecoder(head, weights, kept.table, self.cache, sizes.max_model_len)
        recorded = Graph(model.dtype)
        self.decoder.record(recorded)
        self.graph = self._new_graph(recorded)
        self.arena_bytes = self.graph.arena_bytes

    def graph_of(self, step_id: int) -> _native.Graph:
        return self.graph
