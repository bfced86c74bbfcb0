"""Drafts of a model of its own, in a chain of steps before the one that verifies them.

The draft model's KV lies in the blocks of the sequences themselves, in a cache of its own with as
many: what a sequence shares, gives back or loses it does so for both models. A draft is sampled as
the target samples at its position: with the same random number, filters, penalties and bans.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Literal

from lmi_core._native import StepCosts
from lmi_core.engine.masked_rows import MaskedRows
from lmi_core.engine.sequence import Sequence, SequenceState
from lmi_core.runners.runner import DraftRunner

if TYPE_CHECKING:
    from lmi_core._native import Step

_log = logging.getLogger(__name__)

_FIRST_CHANCE = 0.7
"""Of a draft, given those before it, until some were verified."""
_WEIGHT = 1 / 8
"""Of the newest verified draft among a sequence's."""
_WEIGHT_OF_ALL = 1 / 64
"""Of the newest among all, once there were so many."""
_LEAST_CHANCE = 0.1
"""Of a sequence's drafts, that they are worth a row."""
_PATIENCE, _LEAST_PATIENCE, _MOST_PATIENCE = 64, 2, 1024
"""Steps after which one sequence whose drafts don't pay is tried again: texts and load change. Half
as many, and less, once drafts were right against all odds; twice as many each time that one was
wrong."""
_TRIAL_DEPTH = 2
_TRIALS_SHARE = 1 / 128
"""Of the time, that may be spent on what the draft model lacks of texts that are tried."""
_MOST_TOKENS = 256
"""That a text is taken to go on for, at most: what it lacks is spread over them."""
_SURPRISE = 0.1
"""Trials say that a text has changed where it was less likely than this that they are right."""
_NUM_BESIDE_OTHERS = 128
"""Rows of prompts that a chain computes beside sequences that decode."""
_NUM_SHORT = 4
"""So many missing tokens are no prompt."""


class DraftChain:
    """Draft steps that run one after the other, each on what the one before sampled."""

    __slots__ = ("masked", "rows", "steps")

    def __init__(self) -> None:
        self.masked: dict[Sequence, MaskedRows] = {}
        """Of sequences with a grammar."""
        self.steps: list[Step] = []
        self.rows: dict[Sequence, list[int]] = {}
        """Of a sequence the logit row in each step that samples a draft of it."""

    def lead_to(self, step: Step) -> None:
        """Let a filled step, which is submitted behind the chain, compute what that samples."""
        for sequence, first in self._places(step):
            for i in range(len(sequence.drafts)):
                step.take_token(first + i, self.steps[i], self.rows[sequence][i])

    def read(self, step: Step) -> None:
        """Note in the sequences what ``step``, which is completed, has computed for them."""
        token_ids = step.view("token_ids")
        for sequence, first in self._places(step):
            drafts = sequence.drafts
            drafts[:] = token_ids[first : first + len(drafts)].tolist()
            if (masked := self.masked.get(sequence)) is not None:
                drafts[masked.num_kept :] = [-1] * (len(drafts) - masked.num_kept)

    def mask(self, runner: DraftRunner) -> None:
        """Once all rows are there: let those of sequences with a grammar wait for masks."""
        for sequence, rows in self.rows.items():
            if sequence.matcher is not None:
                steps = self.steps[: len(rows)]
                fds = [runner.completion_fd(step) for step in steps]
                self.masked[sequence] = MaskedRows(steps, rows, fds)

    def _places(self, step: Step) -> list[tuple[Sequence, int]]:
        """Of each sequence the first of its drafts' token rows."""
        token_rows = step.view("logit_token_rows")
        given = [sequence for sequence in self.rows if sequence.drafts]
        return [(sequence, int(token_rows[sequence.logit_row]) + 1) for sequence in given]

    @property
    def seconds(self) -> float:
        """That the worker spent on it, once it is done."""
        return sum(step.native_ns for step in self.steps) * 1e-9


class ModelDrafts:
    """Plans chains, and learns from what becomes of their drafts."""

    def __init__(
        self, runner: DraftRunner, target_costs: StepCosts, *, block_size: int, max_depth: int
    ) -> None:
        self._runner = runner
        self._shift = runner.shift
        self._target_costs = target_costs
        self._costs = StepCosts()
        self._block_size = block_size
        self._max_depth = max_depth
        self._chance = _FIRST_CHANCE
        self._num_seen = 0
        self._chances: dict[Sequence, float] = {}
        self._contents: dict[int, bytes] = {}
        """Hashes of what whole blocks hold of the draft model's KV, where that is known."""
        self._patience, self._num_idle = _PATIENCE, 0
        self._likelihood = 1.0
        """Of the last trials being right, by what was known before each; 1 behind a wrong one."""
        self._num_trials: dict[Sequence, int] = {}
        self._trial: Sequence | None = None
        self._tried: Sequence | None = None
        """What the next chain is to find out about, and what the last one is to."""
        self._has_failed = False

    def can_go_on(self, sequence: Sequence) -> bool:
        """Whether a chain can be filled for the sequence now."""
        return True

    def takes(self, sequence: Sequence) -> bool:
        """Whether a chain can draft for a sequence that decodes."""
        return not self._has_failed and len(sequence.token_ids) < self._runner.max_model_len

    def chance(self, sequence: Sequence) -> float:
        """That a draft for the sequence is right, given those before it."""
        return self._chances.get(sequence, self._chance)

    def depths(
        self,
        sequences: Items[Sequence],
        num_rows: int,
        num_tokens: int,
        most: int,
        *,
        ahead: bool,
    ) -> list[tuple[Sequence, int]]:
        """Of which of ``sequences`` how many drafts bring most tokens a second, in a step that has
        ``num_rows`` rows and brings ``num_tokens`` tokens without, with at most ``most`` drafts;
        ``ahead``: which would be submitted before the last one's tokens are known."""
        self._trial = None
        if most <= 0:
            return []
        chosen = [s for s in sequences if self.chance(s) > _LEAST_CHANCE]
        if len(chosen) > most:
            chosen = sorted(chosen, key=self.chance, reverse=True)[:most]
        chances = [self.chance(s) for s in chosen]
        step = num_rows, num_tokens, min(self._max_depth, most // max(1, len(chosen)))
        extra_s = self._catching_up_s(chosen)
        depth = self._target_costs.common_depth(self._costs, chances, *step, extra_s, ahead=ahead)
        depths = [(sequence, depth) for sequence in chosen if depth]
        self._trial = self._due(sequences, depths, num_rows, ahead=ahead)
        if not depth and self._trial is not None:
            # Where not even drafts that are right pay, a trial would only cost.
            right = [1.0] * min(len(sequences), most)
            step = num_rows, num_tokens, min(self._max_depth, most // len(right))
            if not self._target_costs.common_depth(self._costs, right, *step, 0.0, ahead=ahead):
                self._trial = None
        num_left = most - depth * len(depths)
        if self._trial is not None and num_left > 0:
            depths.append((self._trial, min(_TRIAL_DEPTH, self._max_depth, num_left)))
        room = self._runner.max_model_len
        limited = [
            (s, min(depth, s.max_len - len(s.token_ids) - 1, room - len(s.token_ids)))
            for s, depth in depths
        ]
        return [(sequence, count) for sequence, count in limited if count > 0]

    def _due(
        self,
        sequences: Items[Sequence],
        drafting: Items[tuple[Sequence, int]],
        num_rows: int,
        *,
        ahead: bool,
    ) -> Sequence | None:
        """Of those that don't draft the one whose turn it is to be tried, if it is time: one that
        was tried least, and then the one that takes least."""
        self._num_idle += 1
        if self._num_idle < self._patience:
            return None
        taken = {sequence for sequence, _ in drafting}
        rest = [sequence for sequence in sequences if sequence not in taken]
        if not rest:
            return None
        trial = min(rest, key=lambda s: (self._num_trials.get(s, 0), self._num_behind(s)))
        idle_s = self._num_idle * self._target_costs.seconds(num_rows, ahead=ahead)
        num_rows, costs = self._num_behind(trial), self._costs
        lacking_s = costs.seconds(num_rows, ahead=False) - costs.seconds(1, ahead=False)
        return trial if lacking_s <= _TRIALS_SHARE * idle_s else None

    def _num_behind(self, sequence: Sequence) -> int:
        """Rows that a chain for the sequence begins with."""
        return max(1, self._num_missing(sequence))

    def _catching_up_s(self, sequences: Items[Sequence]) -> float:
        """What it takes until the draft model has all of these texts, for each token to come."""
        rows = [self._num_behind(sequence) for sequence in sequences]
        num_rows = sum(count for count in rows if count > max(_NUM_SHORT, self._max_depth))
        if not num_rows:
            return 0.0
        num_tokens = sum(min(_MOST_TOKENS, s.max_len - len(s.token_ids)) for s in sequences)
        return self._costs.seconds(num_rows, ahead=False) / max(1, num_tokens)

    def _note_begun(self, sequences: Iterable[Sequence]) -> None:
        """A chain that drafts for these will be submitted."""
        if any(sequence is self._trial for sequence in sequences):
            self._tried, self._trial, self._num_idle = self._trial, None, 0

    def _end_trial(self, sequence: Sequence, likelihood: float, *, is_right: bool) -> None:
        """``likelihood``: that all of its drafts would be right."""
        self._tried = None
        if sequence.state is not SequenceState.FINISHED:
            self._num_trials[sequence] = self._num_trials.get(sequence, 0) + 1
        if not is_right:
            self._patience = min(_MOST_PATIENCE, 2 * self._patience)
        self._likelihood = self._likelihood * likelihood if is_right else 1.0
        if self._likelihood < _SURPRISE:
            self._likelihood = 1.0
            self._patience = max(_LEAST_PATIENCE, min(_PATIENCE, self._patience) // 8)

    @property
    def is_trying(self) -> bool:
        """Whether the next chain is for finding out."""
        return self._trial is not None

    def expected(self, sequence: Sequence, depth: int) -> float:
        """How many of so many drafts will be right."""
        chance = self.chance(sequence)
        return sum(chance**i for i in range(1, depth + 1))

    def begin(self, depths: Items[tuple[Sequence, int]], *, beside_others: bool) -> DraftChain:
        """Fill a chain of so many drafts of each sequence. What the draft model hasn't computed of
        a text comes first; where that is too much for a step, this is all that is done."""
        chain, buffers = DraftChain(), self._runner.next_steps()
        ready = self._catch_up(depths, buffers[0], chain, beside_others=beside_others)
        self._note_begun(ready)
        for i in range(1, max(ready.values(), default=0)):
            step = buffers[i]
            step.clear()
            for sequence, depth in ready.items():
                if depth <= i:
                    continue
                # Penalties count the drafts so far, which are computed once more for that.
                fits = step.num_tokens + i + len(ready) <= self._runner.max_num_tokens
                counts = sequence.needs_observe and fits
                self._add_drafts(step, chain, sequence, i, i if counts else 1)
            chain.steps.append(step)
        chain.mask(self._runner)
        return chain

    def _add_drafts(
        self, step: Step, chain: DraftChain, sequence: Sequence, depth: int, count: int
    ) -> None:
        """Let a step compute the last ``count`` of a sequence's ``depth`` drafts so far."""
        rows, row, first = chain.rows[sequence], sequence.row, depth - count
        start, token_row = self._num_rows_of(sequence) + first, step.num_tokens
        num_seen = count if sequence.needs_observe else 0
        logit_row = self._add_rows(step, [0] * count, start, row, "last", num_seen)
        for i in range(count):
            step.take_token(token_row + i, chain.steps[first + i], rows[first + i])
        rows.append(logit_row)

    def _add_rows(
        self,
        step: Step,
        token_ids: list[int],
        start: int,
        row: int,
        logits: Literal["none", "last"],
        num_drafts: int = 0,
    ) -> int:
        """Append rows at positions from ``start`` on; returns the logit row, which samples with the
        random number of the token that follows, or -1."""
        logit_row = step.add(token_ids, start, row, row, logits, num_drafts=num_drafts)
        if logit_row >= 0 and self._shift:
            step.view("sample_positions")[logit_row] += self._shift
        return logit_row

    def _num_rows_of(self, sequence: Sequence) -> int:
        """That a sequence's text takes."""
        return len(sequence.token_ids) - self._shift

    def _catch_up(
        self,
        depths: Items[tuple[Sequence, int]],
        step: Step,
        chain: DraftChain,
        *,
        beside_others: bool,
    ) -> dict[Sequence, int]:
        """Fill the first step; returns how many drafts of each sequence follow from it."""
        step.clear()
        num_left = self._runner.max_num_tokens
        num_of_prompts = _NUM_BESIDE_OTHERS if beside_others else num_left
        ready: dict[Sequence, int] = {}
        pending = [(self._num_missing(s), i) for i, (s, _) in enumerate(depths)]
        for _, i in sorted(pending):
            sequence, depth = depths[i]
            # What those before it compute in this step counts, too: keys are written first.
            num_missing = self._num_missing(sequence)
            is_short = num_missing <= max(_NUM_SHORT, self._max_depth)
            count = min(num_missing, num_left if is_short else min(num_left, num_of_prompts))
            if count <= 0:
                break
            is_whole = count == num_missing and depth > 0
            start, row = sequence.num_drafted, sequence.row
            first = start + self._shift
            ids = self._known_ids(sequence.token_ids[first : first + count])
            logit_row = self._add_rows(step, ids, start, row, "last" if is_whole else "none")
            num_behind = depth - 1 if is_whole else 0
            self._note_written(sequence, start, start + count, num_behind)
            num_left -= count
            num_of_prompts -= 0 if is_short else count
            if is_whole:
                ready[sequence] = depth
                chain.rows[sequence] = [logit_row]
        if step.num_tokens:
            chain.steps.append(step)
        return ready

    def _num_missing(self, sequence: Sequence) -> int:
        """Rows to be computed. Find what others have computed of the sequence's text: whole blocks
        that it shares with them. All but one of its rows, at most, are known then."""
        size, known = self._block_size, sequence.num_drafted
        # Without a prefix cache choices share blocks that have no hashes.
        num_hashed = min(sequence.num_published, len(sequence.hashes))
        while known % size == 0 and known // size < num_hashed:
            i = known // size
            if self._contents.get(sequence.block_ids[i]) != sequence.hashes[i]:
                break
            known += size
        num_rows = self._num_rows_of(sequence)
        # Of a text of one token, whose next one is on its way, a head has no rows at all.
        sequence.num_drafted = max(0, min(known, num_rows - 1))
        return num_rows - sequence.num_drafted

    def _known_ids(self, token_ids: Items[int]) -> list[int]:
        """Embeddings that only the target has are padding, or tokens of no text."""
        size = self._runner.vocab_size
        return [token_id if token_id < size else 0 for token_id in token_ids]

    def _note_written(self, sequence: Sequence, start: int, end: int, num_drafts: int) -> None:
        """The chain computes tokens from ``start`` to ``end``, and drafts behind them."""
        size, sequence.num_drafted = self._block_size, end
        for i in range(start // size, (end + num_drafts - 1) // size + 1):
            block_id = sequence.block_ids[i]
            self._contents.pop(block_id, None)
            num_hashed = min(sequence.num_published, len(sequence.hashes))
            if i < num_hashed and end >= (i + 1) * size:
                self._contents[block_id] = sequence.hashes[i]

    def settle(self, chain: DraftChain, step: Step) -> None:
        """Take over a chain and the step behind it, which are completed."""
        for draft_step in chain.steps:
            if draft_step.error:
                self._fail(draft_step.error)
            elif draft_step.native_ns > 0:
                self._costs.note(draft_step.num_tokens, draft_step.native_ns * 1e-9)
        if not step.error:
            chain.read(step)

    def _fail(self, error: str) -> None:
        """Go on without: what the target computes is right whatever was drafted."""
        if not self._has_failed:
            _log.error("the draft model failed, and drafts nothing any more: %s", error)
        self._has_failed = True

    def count(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learn from a sequence's drafts. The last one's KV was computed by the target alone; and
        what goes on from the target's states, which it had to guess, computes all of them anew."""
        if not self._shift:
            sequence.num_drafted += min(num_accepted, num_drafted - 1)
        chance = before = self.chance(sequence)
        for i in range(min(num_accepted + 1, num_drafted)):
            is_right = i < num_accepted
            chance += _WEIGHT * (is_right - chance)
            self._num_seen += 1
            weight = max(_WEIGHT_OF_ALL, 1 / (self._num_seen + 3))
            self._chance += weight * (is_right - self._chance)
        if sequence is self._tried:
            is_right = num_accepted == num_drafted
            self._end_trial(sequence, before**num_drafted, is_right=is_right)
        if sequence.state is not SequenceState.FINISHED:
            self._chances[sequence] = chance

    def end(self, sequence: Sequence) -> None:
        self._chances.pop(sequence, None)
        self._num_trials.pop(sequence, None)
