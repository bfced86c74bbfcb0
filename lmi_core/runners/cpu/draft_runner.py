"""A draft model on the CPU: its part of the KV blocks, its step graph and its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmi_core import _native
from lmi_core.runners.cpu.sizes import cache_dtype
from lmi_core.runners.step_memory import StepMemory, StepSizes

if TYPE_CHECKING:
    from lmi_core.models.loader import LoadedModel
    from lmi_core.settings.engine_config import EngineConfig

MAX_DRAFT_ROWS = 512
"""Of a step: texts that are longer are computed in several."""
_NUM_CHAINS = 2
"""A chain is filled while the step behind the last one may still read from that."""


class CpuDraftRunner:
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
        from lmi_core.ops.cpu import lower
        from lmi_core.ops.graph import Graph

        spec = model.spec
        self.model = model
        self.vocab_size = spec.vocab_size
        self.max_model_len = min(spec.max_positions, sizes.max_model_len)
        self.max_num_tokens = draft_rows(config)
        self.worker: _native.Worker | None = None
        """Once there is one."""
        self.cache = _native.KvCache(
            num_layers=spec.num_cache_layers,
            num_blocks=shared.pool.num_blocks,
            block_size=config.block_size,
            num_kv_heads=spec.attention.num_kv_heads,
            head_dim=spec.attention.head_dim,
            dtype=cache_dtype(config, model.dtype),
        )
        self.graph = _native.Graph(
            max_tokens=self.max_num_tokens,
            max_seqs=config.max_num_seqs,
            max_logit_rows=config.max_num_seqs,
            max_blocks_per_seq=sizes.max_blocks_per_seq,
            block_size=config.block_size,
            act_dtype=model.dtype,
            instruction_set=config.instruction_set,
        )
        recorded = Graph(model.dtype)
        record(model, recorded, self.cache, self.max_model_len)
        lower(recorded, self.graph)
        self.graph.finish()
        assert config.speculation is not None
        self._chains = tuple(
            tuple(self._step(config, shared) for _ in range(config.speculation.max_draft_tokens))
            for _ in range(_NUM_CHAINS)
        )
        self._next_chain = 0

    def _step(self, config: EngineConfig, shared: StepMemory) -> _native.Step:
        return _native.Step(
            max_tokens=self.max_num_tokens,
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
        self._next_chain = (self._next_chain + 1) % _NUM_CHAINS
        return steps

    def submit(self, steps: Sequence[_native.Step]) -> None:
        assert self.worker is not None, "submit before the worker is there"
        for step in steps:
            self.worker.submit(self.graph, step, -1)


def draft_rows(config: EngineConfig) -> int:
    """Of a step of the draft model, at most."""
    return max(MAX_DRAFT_ROWS, config.max_num_seqs)
