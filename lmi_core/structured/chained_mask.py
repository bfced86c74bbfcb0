"""Masks of rows that follow drafts which a chain of steps samples, by the same masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from lmi_core.structured.mask_threads import MAX_DRAFTS_S, MissingMask
from lmi_core.structured.matcher import Mask, Matcher


class ChainedRows(Protocol):
    """A sequence's rows in a chain of draft steps, of which each waits for its mask."""

    num_kept: int
    """Leading drafts that may come; known once the masks of all rows are."""

    def give(self, step_id: int, mask: Mask | None) -> None:
        """Let a step's row sample by a mask; None: nothing."""
        ...

    def wait(self, step_id: int, is_over: Callable[[], bool]) -> int:
        """What a step sampled, once it is done; -1: nothing, or ``is_over`` before that."""
        ...


class ChainedMask(MissingMask):
    """Has a thread of its own, since it waits for steps that wait for others' masks."""

    __slots__ = ("_num_given", "_rows")
    needs_thread = True

    def __init__(
        self,
        matcher: Matcher,
        masks: Sequence[Mask],
        ready: Callable[[Exception | None], None],
        drafts: list[int],
        rows: ChainedRows,
    ) -> None:
        super().__init__(matcher, masks, ready, drafts)
        self._rows = rows
        self._num_given = 0

    def _follow_drafts(self, filled: Mask) -> None:
        """Give each draft's row its mask, wait for the draft, and fill the mask behind it; go back
        in the end."""
        num_accepted = num_kept = 0
        with suppress(Exception):  # a draft that is what is sampled raises it once more
            for i in range(len(self._masks) - 1):
                if not self._give(i, filled[i]):
                    break
                draft = self._rows.wait(i, lambda: self.is_settled)
                if draft < 0 or self.spent_s() > MAX_DRAFTS_S:
                    break
                self._matcher.accept(draft)
                num_accepted += 1
                self._matcher.fill_mask(filled[i + 1])
                num_kept += 1
        if num_accepted:
            self._matcher.rollback(num_accepted)
        filled[num_kept + 1 :] = 0
        self._rows.num_kept = num_kept

    def _give(self, step_id: int, mask: Mask) -> bool:
        with self._lock:
            if self.is_settled:
                return False
            self._rows.give(step_id, mask)
            self._num_given = step_id + 1
            return True

    def settle(
        self, filled: Mask | None, error: Exception | None, *, ends_thread: bool = False
    ) -> bool:
        if not super().settle(filled, error, ends_thread=ends_thread):
            return False
        for step_id in range(self._num_given, len(self._masks) - 1):
            self._rows.give(step_id, None)
        return True
