"""What everything that drafts on the CPU has: graphs of its own for the steps of its chains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lmi_core import _native
from lmi_core.runners.draft_steps import DraftSteps

if TYPE_CHECKING:
    from lmi_core.ops.graph import Graph


class DraftChains(DraftSteps):
    """Implements ``DraftRunner`` but for its graphs, of which each step of a chain has one."""

    worker: _native.Worker | None = None
    """Once there is one."""

    def graph_of(self, step_id: int) -> _native.Graph:
        """What computes a chain's steps of this number."""
        raise NotImplementedError

    def _new_graph(self, recorded: Graph) -> _native.Graph:
        from lmi_core.ops.cpu import lower

        config = self._config
        graph = _native.Graph(
            max_tokens=self.max_num_tokens,
            max_seqs=config.max_num_seqs,
            max_logit_rows=config.max_num_seqs,
            max_blocks_per_seq=self._sizes.max_blocks_per_seq,
            block_size=config.block_size,
            act_dtype=recorded.act_dtype,
            instruction_set=config.instruction_set,
        )
        lower(recorded, graph)
        graph.finish()
        return graph

    def submit(self, steps: Sequence[_native.Step]) -> None:
        assert self.worker is not None, "submit before the worker is there"
        for step_id, (step, fd) in enumerate(zip(steps, self._watched_fds(steps), strict=True)):
            self.worker.submit(self.graph_of(step_id), step, fd)
