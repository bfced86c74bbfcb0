"""Rows and KV blocks of running sequences."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from lmi_core.engine.contrastive_search import ContrastiveSearch
from lmi_core.engine.logits_processors import NO_PROCESSORS
from lmi_core.engine.pinned_prefixes import PinnedPrefixes
from lmi_core.engine.restore import PrefixRestore
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.sequence import ActiveRequest, Sequence, SequenceState
from lmi_core.runners.runner import PaddedRunner, Runner

if TYPE_CHECKING:
    from lmi_core._native import BlockPool


class KvMemory:
    """Gives sequences a row and blocks, shares blocks between them, and takes all of it back.

    What is freed may be used again at once: no step that was submitted refers to it.
    """

    def __init__(
        self, runner: Runner, *, enable_prefix_caching: bool, guaranteed_no_evict: bool
    ) -> None:
        self.pool: BlockPool = runner.pool
        self.block_size = runner.info.block_size
        self.pinned = PinnedPrefixes(self.pool)
        self._tables = runner.block_tables
        self._sampling = runner.sampling
        self._padded = cast(PaddedRunner, runner) if runner.info.pads_batches else None
        self._shares_blocks = runner.info.shares_blocks
        self._enable_prefix_caching = enable_prefix_caching and runner.info.caches_prefixes
        self._guaranteed_no_evict = guaranteed_no_evict
        self._num_rows = runner.info.max_num_seqs
        self._vocab_size = runner.info.vocab_size
        self._info = runner.info
        self._free_rows = list(range(self._num_rows - 1, -1, -1))
        self.restore: PrefixRestore | None = None
        """What keeps blocks on a disk, too; None: nothing does."""
        self._num_promised = 0
        """Blocks that running sequences may still ask for (guaranteed_no_evict)."""

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_max_tokens(self) -> int:
        """The longest sequence that fits into the whole pool."""
        return self.pool.num_blocks * self.block_size

    def hash_prompt(self, prompt_ids: list[int], seed: bytes) -> list[bytes]:
        """Hashes of the prompt's full blocks, empty when prefixes aren't cached."""
        if not self._enable_prefix_caching:
            return []
        return self.pool.hash_blocks(prompt_ids, extra=seed)

    def usable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Those of blocks that may be found instead of computed, which leaves one token at least
        to compute."""
        computes_all = sequence.is_scoring_prompt or sequence.request.wants_states
        if not self._enable_prefix_caching or computes_all:
            return []
        return sequence.hashes[: (len(sequence.token_ids) - 1) // self.block_size]

    def admit(self, sequence: Sequence, *, num_spare_blocks: int) -> bool:
        """Give a waiting sequence, and its gang, rows and blocks for all of their tokens, if that
        leaves ``num_spare_blocks`` available; False otherwise. What is cached, or computed by a
        sibling, is shared. Whatever it raises, it has taken nothing."""
        has_room = False
        admitted: list[Sequence] = []
        try:
            has_room = self._take_state_blocks(sequence.request, num_spare_blocks)
            for member in sequence.gang if has_room else ():
                has_room = self._admit_one(member, num_spare_blocks)
                if not has_room:
                    break
                admitted.append(member)
        except Exception:
            self._release_all(admitted, sequence.request)
            raise
        if not has_room:
            self._release_all(admitted, sequence.request)
        return has_room

    def _release_all(self, sequences: list[Sequence], request: ActiveRequest) -> None:
        for sequence in sequences:
            self.release(sequence)
        self._free_state_blocks(request)

    def _admit_one(self, sequence: Sequence, num_spare_blocks: int) -> bool:
        if not self._free_rows:
            return False
        source = _fork_source(sequence) if self._shares_blocks else None
        if source is not None:
            return self._admit_fork(sequence, source, num_spare_blocks)
        shared = self._cached_prefix(sequence)
        num_computed = len(shared) * self.block_size
        if not self._take(sequence, shared, num_computed, num_spare_blocks):
            return False
        if sequence.choice == 0:
            sequence.request.note_cached(num_computed)
        return True

    def fork(self, sequences: list[Sequence], sources: list[Sequence]) -> bool:
        """Let each sequence of a gang, all of whose tokens are computed, go on behind its source
        with that one's blocks, and those without a row get one. A block that isn't full is copied,
        but for one of those that have it. False where there is no room: nothing was taken.
        """
        new = [sequence for sequence in sequences if sequence.row < 0]
        is_full = sources[0].num_computed % self.block_size == 0
        num_copies = 0 if is_full else len(sources) - len(set(sources))
        num_blocks = len(sources[0].block_ids)
        num_promised = sum(self._num_max_blocks(sequence) - num_blocks for sequence in new)
        num_needed = num_copies
        if self._guaranteed_no_evict:
            num_needed += num_promised + self._num_promised
        self.pinned.make_room(num_needed)
        if len(new) > len(self._free_rows) or num_needed > self.pool.num_available:
            return False
        copies = self.pool.allocate(num_copies)
        if copies is None:
            return False
        tables = self._forked_tables(sequences, sources, copies)
        for sequence, table in zip(sequences, tables, strict=True):
            if sequence.row < 0:
                sequence.row = self._free_rows.pop()
                self._set_sampling(sequence)
            self.pool.free(sequence.block_ids)
            sequence.block_ids = table
            sequence.num_published = sources[0].num_published
            sequence.num_computed = sources[0].num_computed
            self._tables.set(sequence.row, table)
        self._num_promised += num_promised
        return True

    def _forked_tables(
        self, sequences: list[Sequence], sources: list[Sequence], copies: list[int]
    ) -> list[list[int]]:
        """Their blocks, each held once more for each; ``copies`` are for those that need one."""
        has_copies = bool(copies)
        kept: set[Sequence] = set()
        tables = []
        for sequence, source in zip(sequences, sources, strict=True):
            table = source.block_ids[:]
            own: list[int] = []
            if has_copies and source in kept:
                own = [copies.pop()]
                sequence.copy = (table.pop(), own[0])
            kept.add(source)
            self.pool.add_ref(table)
            tables.append(table + own)
        return tables

    def extend(self, sequence: Sequence) -> bool:
        """One more block; False when there is none. Whatever it raises, it has taken nothing."""
        self.pinned.make_room(1)
        new_ids = self.pool.allocate(1)
        if new_ids is None:
            return False
        try:
            self._tables.append(sequence.row, new_ids)
        except Exception:
            self.pool.free(new_ids)
            raise
        sequence.block_ids += new_ids
        self._num_promised -= 1
        return True

    def draft_room(self, sequence: Sequence, num_tokens: int, num_spare_blocks: int) -> int:
        """Take blocks for so many tokens behind the last one, as long as that leaves
        ``num_spare_blocks`` available; returns for how many there is room."""
        end = len(sequence.token_ids) + num_tokens
        while end > len(sequence.block_ids) * self.block_size:
            if self.pool.num_available <= num_spare_blocks or not self.extend(sequence):
                break
        num_slots = len(sequence.block_ids) * self.block_size
        return min(num_tokens, num_slots - len(sequence.token_ids))

    def give_back(self, sequence: Sequence) -> None:
        """Free the blocks that hold nothing but tokens which weren't accepted."""
        num_needed = -(-sequence.num_computed // self.block_size)
        extra = sequence.block_ids[num_needed:]
        if not extra:
            return
        del sequence.block_ids[num_needed:]
        self._tables.set(sequence.row, sequence.block_ids)
        self.pool.free(extra)
        self._num_promised += len(extra)

    def publish(self, sequence: Sequence) -> None:
        """Make the full blocks that a completed step wrote hit-able."""
        num_full = sequence.num_computed // self.block_size
        if num_full == sequence.num_published or not self._enable_prefix_caching:
            return
        hashes = sequence.hashes
        if len(hashes) < num_full:
            filled = sequence.token_ids[len(hashes) * self.block_size : num_full * self.block_size]
            seed = sequence.request.prefix_seed
            hashes += self.pool.hash_blocks(filled, hashes[-1] if hashes else b"", seed)
        for i in range(sequence.num_published, num_full):
            self.pool.publish(sequence.block_ids[i], hashes[i])
            if self.restore is not None:
                self.restore.published.append(hashes[i])
        sequence.num_published = num_full

    def keep_published(self) -> None:
        """Have what was published kept on a disk, where one is there for it."""
        if self.restore is not None:
            self.restore.keep_published()

    def pin(self, sequence: Sequence) -> None:
        """Keep the full blocks of a sequence that ends for the next request of its session."""
        session = sequence.request.request.session
        if session and sequence.choice == 0 and self._enable_prefix_caching:
            self.pinned.pin(session, sequence.block_ids[: sequence.num_published])

    def release(self, sequence: Sequence) -> None:
        """Take row and blocks back; published contents stay hit-able until evicted."""
        if sequence.choice == 0:
            self._free_state_blocks(sequence.request)
        self._num_promised -= self._num_max_blocks(sequence) - len(sequence.block_ids)
        self.pool.free(sequence.block_ids)
        self._tables.clear(sequence.row)
        self._free_rows.append(sequence.row)
        sequence.row = -1
        sequence.copy = None
        sequence.block_ids = []
        sequence.num_computed = sequence.num_published = sequence.num_drafted = 0

    def observe(self, sequence: Sequence, token_id: int) -> None:
        """Count an output token, for penalties and the minimum length."""
        self._sampling.observe(sequence.row, token_id)

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raise NativeError or AssertionError unless every block and row is accounted for."""
        self.pool.check_integrity()
        references = Counter(block for sequence in running for block in sequence.block_ids)
        references.update(self.pinned.block_ids())
        references.update(b for s in running if s.choice == 0 for b in s.request.state_blocks)
        for block_id, num_references in references.items():
            assert self.pool.ref_count(block_id) == num_references, f"block {block_id}"
        assert self.pool.num_used == len(references), "blocks without a sequence"
        rows = [sequence.row for sequence in running] + self._free_rows
        assert sorted(rows) == list(range(self._num_rows)), f"rows {sorted(rows)}"
        for sequence in running:
            assert self._tables.row(sequence.row) == sequence.block_ids, f"row {sequence.row}"
        promised = sum(self._num_max_blocks(s) - len(s.block_ids) for s in running)
        assert self._num_promised == promised, f"promised {self._num_promised}, not {promised}"

    def _admit_fork(self, sequence: Sequence, source: Sequence, num_spare_blocks: int) -> bool:
        """Share a sibling's prompt but for its last token, which the fork computes itself for its
        own first sample. A block that ends within the prompt is copied."""
        num_computed = sequence.num_prompt - 1
        num_shared, num_copied_tokens = divmod(num_computed, self.block_size)
        shared = source.block_ids[:num_shared]
        self.pool.add_ref(shared)
        if not self._take(sequence, shared, num_computed, num_spare_blocks):
            return False
        if num_copied_tokens:
            sequence.copy = (source.block_ids[num_shared], sequence.block_ids[num_shared])
        return True

    def _take_state_blocks(self, request: ActiveRequest, num_spare_blocks: int) -> bool:
        """Hold as many blocks as a request's hidden states take of memory; they stay empty."""
        search = request.search
        if not isinstance(search, ContrastiveSearch) or request.state_blocks:
            return True
        num_spare = self._num_promised if self._guaranteed_no_evict else num_spare_blocks
        num_needed = search.num_state_blocks + num_spare
        self.pinned.make_room(num_needed)
        if num_needed <= self.pool.num_available:
            request.state_blocks = self.pool.allocate(search.num_state_blocks) or []
        return bool(request.state_blocks)

    def _free_state_blocks(self, request: ActiveRequest) -> None:
        if request.state_blocks:
            self.pool.free(request.state_blocks)
            request.state_blocks = []

    def _take(
        self, sequence: Sequence, shared: list[int], num_computed: int, num_spare_blocks: int
    ) -> bool:
        """Complete ``shared``, whose references are held, to a full table, or drop it."""
        num_new = -(-len(sequence.token_ids) // self.block_size) - len(shared)
        num_needed = num_new + num_spare_blocks
        if self._guaranteed_no_evict:
            num_needed = self._num_max_blocks(sequence) - len(shared) + self._num_promised
        new_ids = None
        self.pinned.make_room(num_needed)
        if num_needed <= self.pool.num_available:
            try:
                new_ids = self.pool.allocate(num_new)
            except Exception:
                self.pool.free(shared)
                raise
        if new_ids is None:
            self.pool.free(shared)
            return False
        sequence.row = self._free_rows.pop()
        sequence.block_ids = shared + new_ids
        sequence.num_published = len(shared)
        sequence.num_computed = num_computed
        if self._padded is not None:
            processors = sequence.request.request.params.processors or NO_PROCESSORS
            self._padded.final_lengths[sequence.row] = sequence.final_len
            self._padded.begin_ids[sequence.row] = processors.forced_bos_token_id
        self._num_promised += self._num_max_blocks(sequence) - len(sequence.block_ids)
        try:
            self._tables.set(sequence.row, sequence.block_ids)
            self._set_sampling(sequence)
        except Exception:
            self.release(sequence)
            raise
        return True

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix."""
        return self.pool.acquire_prefix(self.usable_hashes(sequence))

    def _num_max_blocks(self, sequence: Sequence) -> int:
        return -(-sequence.max_len // self.block_size)

    def _set_sampling(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.row_settings is None:
            request.row_settings = self._row_settings(sequence)
        self._sampling.set(sequence.row, choice=sequence.choice, **request.row_settings)
        if sequence.needs_observe:
            processors = request.request.params.processors or NO_PROCESSORS
            begin_id = processors.forced_bos_token_id
            before = self._info.before_outputs(request.prompt_ids, begin_id)
            self._sampling.observe_prompt(sequence.row, before)
            self._sampling.observe_many(sequence.row, sequence.token_ids[sequence.num_prompt :])
        is_search = request.request.params.is_search
        sequence.is_counted_ahead = self._info.counts_ahead and not is_search
        sequence.note_plain()

    def _row_settings(self, sequence: Sequence) -> dict[str, Any]:
        """Of each of a request's sequences, in what the table takes fastest."""
        request, search = sequence.request, sequence.request.search
        params = request.request.params
        processors = params.processors or NO_PROCESSORS
        most = sequence.max_len - sequence.num_prompt
        has_forced_end = bool(processors.forced_end_ids(self._info.forced_end_ids))
        num_begun = max(0, len(self._info.first_ids) - 1)
        end_ids = np.array(sorted(sequence.end_ids), np.int32)
        return {
            "temperature": params.temperature,
            "top_k": min(params.top_k, self._vocab_size),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "typical_p": params.typical_p,
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "seed": request.seed,
            "num_logprobs": _num_logprobs(params) if search is None else search.num_ranked,
            "biases": request.biases,
            "banned_ids": np.array(params.banned_token_ids, np.int32),
            "min_tokens": min(params.min_new_tokens, most - has_forced_end),
            "min_tokens_banned_ids": end_ids,
            "watermark_gamma": params.watermark_gamma,
            "watermark_delta": params.watermark_delta,
            **processors.row_settings(request.prompt_ids, end_ids, num_begun),
        }


def _num_logprobs(params: SamplingParams) -> int:
    """As the sampling table counts: -1 spares the sampler the distribution's sum."""
    wanted = (params.logprobs, params.prompt_logprobs)
    return max(-1 if count is None else count for count in wanted)


def _fork_source(sequence: Sequence) -> Sequence | None:
    """A running sibling that has computed the prompt, for a choice that has no output yet."""
    if sequence.choice == 0 or sequence.num_generated:
        return None
    for sibling in sequence.request.sequences:
        is_running = sibling.state is SequenceState.RUNNING
        if is_running and sibling.num_computed >= sibling.num_prompt:
            return sibling
    return None
