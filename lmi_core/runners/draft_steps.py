"""What everything that drafts has, on any device: the steps of its chains."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from lmi_core import _native
from lmi_core.runners.step_memory import NUM_STEPS, StepMemory, StepSizes

if TYPE_CHECKING:
    from lmi_core.settings.engine_config import EngineConfig

MAX_DRAFT_ROWS = 512
"""Of a step: texts that are longer are computed in several."""


class DraftSteps:
    """Implements ``DraftRunner`` but for ``submit``."""

    def __init__(
        self,
        config: EngineConfig,
        sizes: StepSizes,
        shared: StepMemory,
        *,
        max_num_tokens: int,
        num_steps: int,
    ) -> None:
        """``sizes``, ``shared``: of the steps of the model that it drafts for; ``num_steps``: of a
        chain, at most. A chain is filled while the step behind the last one may read from that."""
        self.vocab_size = sizes.vocab_size
        self.max_model_len = sizes.max_model_len
        self.max_num_tokens = max_num_tokens
        self.shift = 0
        self.num_bytes = self.arena_bytes = 0
        """Of its weights, and of a step's values."""
        self._config = config
        self._sizes = sizes
        self._chains = tuple(
            tuple(self._step(shared) for _ in range(num_steps)) for _ in range(NUM_STEPS - 1)
        )
        self._next_chain = 0
        self._fds: dict[_native.Step, int] = {}
        self._watched: set[_native.Step] = set()

    def _step(self, shared: StepMemory) -> _native.Step:
        config = self._config
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
        self._next_chain = (self._next_chain + 1) % len(self._chains)
        return steps

    def _watched_fds(self, steps: Sequence[_native.Step]) -> list[int]:
        """Of each step of a chain that is submitted what to write to when it is done; -1: none."""
        fds = [self._fds[step] if step in self._watched else -1 for step in steps]
        self._watched.clear()
        return fds

    def completion_fd(self, step: _native.Step) -> int:
        fd = self._fds.get(step)
        if fd is None:
            fd = self._fds[step] = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        elif step not in self._watched:
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
        self._watched.add(step)
        return fd

    def close(self) -> None:
        """Once the worker has done all that was submitted. Idempotent."""
        while self._fds:
            os.close(self._fds.popitem()[1])


def draft_rows(config: EngineConfig) -> int:
    """Of a step of what reads texts, at most."""
    return max(MAX_DRAFT_ROWS, config.max_num_seqs)


def most_drafts(config: EngineConfig) -> int:
    """Of a sequence in a step."""
    assert config.speculation is not None
    return config.speculation.max_draft_tokens
