"""A runner whose model is a hash function of what it sees through a simulated KV cache.

It uses the real block pool, block tables, sampling table and step buffers. Its cache remembers
which token, position and adapter was written to each slot, so a wrong slot, position, table, copy
or order of steps gives wrong tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lmi_core import _native
from lmi_core.errors import ModelError
from lmi_core.runners.runner import RunnerInfo

VOCAB_SIZE = 256
NUM_STATE_COLUMNS = 8


def next_token(
    context: Sequence[int],
    position: int,
    sampling: SamplingRow,
    masked: frozenset[int] = frozenset(),
) -> int:
    """The model: a function of context, position, seed, choice and observed tokens."""
    data = repr((list(context), position, sampling.identity())).encode()
    value = int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little")
    banned = sampling.banned() | masked
    token = value % VOCAB_SIZE
    if len(banned) == VOCAB_SIZE:
        return -1
    while token in banned:
        token = (token + 1) % VOCAB_SIZE
    return token


def logprob_of(context: Sequence[int], token_id: int) -> float:
    """A stand-in for a log-probability, exact in float32."""
    data = repr((list(context), token_id)).encode()
    return -int.from_bytes(hashlib.blake2b(data, digest_size=2).digest(), "little") / 256


def state_of(context: Sequence[int]) -> npt.NDArray[np.float32]:
    """A stand-in for the last token's hidden state."""
    data = hashlib.blake2b(repr(list(context)).encode(), digest_size=NUM_STATE_COLUMNS).digest()
    return np.frombuffer(data, np.uint8).astype(np.float32) - 127.5


def _sampled(ids: Iterable[int]) -> npt.NDArray[np.int64]:
    """Of ids those that are ever sampled."""
    array = ids if isinstance(ids, np.ndarray) else np.array(list(ids), np.int64)
    return array[array < VOCAB_SIZE]


class SamplingRow:
    """What was set and observed for a row."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.prompt_counts: Counter[int] = Counter()
        self.output_counts: Counter[int] = Counter()

    def identity(self) -> tuple[object, ...]:
        counts = sorted(self.prompt_counts.items()), sorted(self.output_counts.items())
        if self.settings["temperature"] == 0:
            return counts
        return (self.settings["seed"], self.settings["choice"], counts)

    def after(self, token_ids: Sequence[int]) -> SamplingRow:
        """The row as it is once these have been generated."""
        row = SamplingRow(**self.settings)
        row.prompt_counts = self.prompt_counts
        row.output_counts = self.output_counts + Counter(token_ids if self.observes() else ())
        return row

    def observes(self) -> bool:
        neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return self.settings.get("min_tokens", 0) > 0 or any(
            self.settings.get(name, value) != value for name, value in neutral.items()
        )

    def banned(self) -> set[int]:
        lists = [self.settings["banned_ids"]]
        if self.output_counts.total() < self.settings["min_tokens"]:
            lists.append(self.settings["min_tokens_banned_ids"])
        return {int(i) for ids in lists for i in _sampled(ids)}


class FakeSampling:
    """The native sampling table, with a readable copy of what it was told."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.native = _native.SamplingTable(num_rows, vocab_size)
        self.rows: dict[int, SamplingRow] = {}

    def set(self, row: int, **settings: Any) -> None:
        self.native.set(row, **settings)
        self.rows[row] = SamplingRow(**settings)

    def observe_prompt(self, row: int, token_ids: Sequence[int]) -> None:
        self.native.observe_prompt(row, token_ids)
        if self.rows[row].settings["repetition_penalty"] != 1.0:
            self.rows[row].prompt_counts.update(token_ids)

    def observe(self, row: int, token_id: int) -> None:
        self.native.observe(row, token_id)
        self.rows[row].output_counts[token_id] += 1

    def observe_many(self, row: int, token_ids: Sequence[int]) -> None:
        self.native.observe_many(row, token_ids)
        self.rows[row].output_counts.update(token_ids)


class PoisoningPool:
    """The native block pool; what it allocates holds nothing that a step may read unwritten."""

    def __init__(self, pool: _native.BlockPool, cached: npt.NDArray[np.int64]) -> None:
        self._pool = pool
        self._cached = cached

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def allocate(self, num_blocks: int) -> list[int] | None:
        block_ids = self._pool.allocate(num_blocks)
        for block_id in block_ids or ():
            start = block_id * self._pool.block_size
            self._cached[start : start + self._pool.block_size] = -1
        return block_ids


class FakeAdapter(NamedTuple):
    """``number`` tells one load from every other."""

    number: int
    num_bytes: int = 0


class FakeAdapters:
    """Adapters by slot, each slot used by one at a time."""

    def __init__(self) -> None:
        self.by_slot: dict[int, FakeAdapter] = {}
        self._numbers = itertools.count(1)

    def pack(self, path: Path) -> FakeAdapter:
        if path.name == "broken":
            raise ModelError(f"{path} is broken")
        return FakeAdapter(next(self._numbers))

    def set(self, slot: int, adapter: FakeAdapter | None) -> None:
        if adapter is None:
            del self.by_slot[slot]
        else:
            assert slot not in self.by_slot
            self.by_slot[slot] = adapter

    def of_rows(self, step: _native.Step) -> npt.NDArray[np.int64]:
        """The number of each token row's adapter; 0: none."""
        numbers = np.zeros(step.num_tokens, np.int64)
        names = ("adapter_first_rows", "adapter_num_rows", "adapter_slots")
        for first, count, slot in zip(*(step.view(name) for name in names), strict=True):
            numbers[first : first + count] = self.by_slot[int(slot)].number
        return numbers


class FakeModel:
    """The simulated cache and the execution of a step, synchronous."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_logit_rows: int = 16,
        max_model_len: int = 256,
        num_saturating_tokens: int | None = 24,
        num_steps: int = 3,
        max_logprobs: int = 5,
        has_adapters: bool = False,
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        """``vocab_size``: of which no more than the first ``VOCAB_SIZE`` are ever sampled."""
        self.info = RunnerInfo(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_logit_rows=max_logit_rows,
            max_logprobs=max_logprobs,
            num_blocks=num_blocks,
            block_size=block_size,
            num_saturating_tokens=num_saturating_tokens,
            counts_ahead=True,
            verifies_drafts=True,
            has_adapters=has_adapters,
            num_state_columns=NUM_STATE_COLUMNS,
            kv_cache_bytes=1024 * num_blocks * block_size,
        )
        self.adapters = FakeAdapters()
        self.cached = np.full((num_blocks * block_size, 3), -1, dtype=np.int64)
        """Per slot: token id, position and adapter."""
        pool = _native.BlockPool(num_blocks, block_size, bytes(range(16)))
        self.pool: Any = PoisoningPool(pool, self.cached)
        self.block_tables = _native.BlockTables(max_num_seqs, -(-max_model_len // block_size))
        self.fake_sampling = FakeSampling(max_num_seqs, vocab_size)
        self.sampling: Any = self.fake_sampling
        self.steps = tuple(
            _native.Step(
                max_tokens=max_num_batched_tokens,
                max_seqs=max_num_seqs,
                max_logit_rows=max_logit_rows,
                max_logprobs=max_logprobs,
                max_copies=max_num_seqs,
                block_size=block_size,
                block_tables=self.block_tables,
                sampling=self.fake_sampling.native,
            )
            for _ in range(num_steps)
        )
        self.num_computed_tokens = 0

    def execute(self, step: _native.Step, token_ids: Sequence[int] = ()) -> None:
        """Read the step as a kernel would and write its results. ``token_ids``: instead of its
        own, where they aren't -1."""
        block_size = self.info.block_size
        for source, target in zip(step.view("copy_src"), step.view("copy_dst"), strict=True):
            self.cached[target * block_size : (target + 1) * block_size] = self.cached[
                source * block_size : (source + 1) * block_size
            ]
        slots = step.view("slots")
        assert len(set(slots.tolist())) == len(slots), "two tokens in one slot"
        own_ids = step.view("token_ids").tolist()
        followed_ids = token_ids or [-1] * len(own_ids)
        step_ids = [own if id < 0 else id for own, id in zip(own_ids, followed_ids, strict=True)]
        for row in step.counted_rows:
            seen = step_ids[step.view("logit_token_rows")[row]]
            self.fake_sampling.observe(int(step.view("sampling_rows")[row]), seen)
        self.cached[slots, 0] = step_ids
        self.cached[slots, 1] = step.view("positions")
        self.cached[slots, 2] = self.adapters.of_rows(step)
        self.num_computed_tokens += len(slots)
        masked = {
            int(row): frozenset(
                np.flatnonzero(np.unpackbits(~mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE])
            )
            for row, mask in zip(*step.wait_for_masks(), strict=True)
        }
        for logit_row, token_row in enumerate(step.view("logit_token_rows").tolist()):
            self._answer(step, logit_row, token_row, masked.get(logit_row, frozenset()))

    def _answer(
        self, step: _native.Step, logit_row: int, token_row: int, masked: frozenset[int]
    ) -> None:
        context = self._context(step, token_row)
        target = int(step.view("target_ids")[logit_row])
        row = int(step.view("sampling_rows")[logit_row])
        num_drafts = int(step.view("num_drafts")[logit_row])
        drafts = context[len(context) - num_drafts :]
        sampling = self.fake_sampling.rows[row].after(drafts)
        num_top = sampling.settings["num_logprobs"]
        top = [(i, logprob_of(context, i)) for i in range(num_top)]
        if target >= 0:
            step.set_result(logit_row, -1, logprob_of(context, target), top, target + 1)
            return
        position = int(step.view("sample_positions")[logit_row])
        token = next_token(context, position, sampling, masked)
        step.set_result(logit_row, token, logprob_of(context, token), top)

    def _context(self, step: _native.Step, token_row: int) -> list[int]:
        first_rows = step.view("first_rows")
        sequence = int(np.searchsorted(first_rows, token_row, side="right")) - 1
        position = int(step.view("positions")[token_row])
        num_tokens = position + 1
        kv_length = int(step.view("kv_lengths")[sequence])
        assert kv_length >= num_tokens
        blocks = np.array(self.block_tables.row(int(step.view("table_rows")[sequence])))
        positions = np.arange(num_tokens)
        block_size = self.info.block_size
        seen = self.cached[blocks[positions // block_size] * block_size + positions % block_size]
        assert (seen[:, 1] == positions).all(), f"stale cache: {seen[:, 1]}"
        adapter = self.adapters.of_rows(step)[token_row]
        assert (seen[:, 2] == adapter).all(), f"blocks of others than {adapter}: {seen[:, 2]}"
        context: list[int] = seen[:, 0].tolist()
        return context


class FakeRunner(FakeModel):
    """Executes steps in a thread and answers through an eventfd, as the native worker does."""

    def __init__(self, *, step_s: float = 0.0, runs_ahead: bool = False, **capacities: int) -> None:
        super().__init__(num_steps=3 if runs_ahead else 2, **capacities)
        self.info = replace(self.info, runs_ahead=runs_ahead)
        self.num_ahead = 0
        """Steps that were submitted before the last one completed."""
        self.step_s = step_s
        self.claimed_s = 0.0
        """What steps say that they took."""
        self.fail_step: Callable[[int], str] = lambda number: ""
        """Called with a step's number; a text fails the step with it."""
        self.fails_late = False
        """Steps that fail have done their work, so that the one behind finds what it reads."""
        self.is_closed = False
        self.completion_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: queue.SimpleQueue[tuple[_native.Step, list[int]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def submit(self, step: _native.Step) -> None:
        assert not self.is_closed
        self._queue.put((step, []))

    def submit_with_states(self, step: _native.Step) -> None:
        self.submit(step)

    def states(self, step: _native.Step) -> npt.NDArray[np.float32]:
        return np.stack([state_of(self._context(step, row)) for row in range(step.num_tokens)])

    def submit_ahead(self, step: _native.Step, logit_rows: list[int]) -> None:
        assert self.info.runs_ahead
        assert len(logit_rows) == len(step.view("token_ids"))
        self.num_ahead += 1
        self._queue.put((step, logit_rows))

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._queue.put(None)
        self._thread.join()
        os.close(self.completion_fd)

    def _main(self) -> None:
        number = 0
        sampled: list[int] = []
        while (item := self._queue.get()) is not None:
            step, logit_rows = item
            if self.step_s:
                time.sleep(self.step_s)
            try:
                failure = self.fail_step(number)
                if failure and not self.fails_late:
                    step.error = failure
                    sampled = [0] * self.info.max_logit_rows
                else:
                    ids = [max(sampled[row], 0) if row >= 0 else -1 for row in logit_rows]
                    self.execute(step, ids)
                    sampled = step.sampled()
                    step.error = failure
            except Exception as error:
                step.error = repr(error)
            ended_ns = time.monotonic_ns()
            began_ns = ended_ns - int(self.claimed_s * 1e9)
            step.set_times(submitted_ns=began_ns, started_ns=began_ns, finished_ns=ended_ns)
            number += 1
            os.eventfd_write(self.completion_fd, 1)
