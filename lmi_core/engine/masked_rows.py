"""Rows of a chain of draft steps that sample by masks, which follow the drafts before them."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmi_core.structured.matcher import Mask

if TYPE_CHECKING:
    from lmi_core._native import Step

_CHECK_MS = 100


class MaskedRows:
    """Implements ``ChainedRows``."""

    def __init__(self, steps: list[Step], rows: list[int], completion_fds: list[int]) -> None:
        """Of each step a logit row; ``completion_fds`` stay readable once the steps are done."""
        self._steps = steps
        self._rows = rows
        self._fds = completion_fds
        self._masks = [step.add_mask(row) for step, row in zip(steps, rows, strict=True)]
        self.num_kept = 0

    def give(self, step_id: int, mask: Mask | None) -> None:
        self._masks[step_id][:] = 0 if mask is None else mask
        self._steps[step_id].set_mask_ready(self._rows[step_id])

    def wait(self, step_id: int, is_over: Callable[[], bool]) -> int:
        poll = select.poll()
        poll.register(self._fds[step_id], select.POLLIN)
        while not poll.poll(_CHECK_MS):
            if is_over():
                return -1
        step = self._steps[step_id]
        return -1 if step.error else int(step.view("sampled_ids")[self._rows[step_id]])
