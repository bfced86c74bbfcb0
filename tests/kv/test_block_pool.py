"""The block pool against a model of it in a few lines of Python."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmi_core._native import BlockPool, NativeError

BLOCK_SIZE = 4
NUM_BLOCKS = 10
SECRET = bytes(range(16))


class NaivePool:
    """What the pool promises, written for clarity: lists, first to be taken first."""

    def __init__(self) -> None:
        self.free = list(range(NUM_BLOCKS))
        self.cached: list[int] = []
        self.references = [0] * NUM_BLOCKS
        self.index: dict[bytes, int] = {}

    def hash_of(self, block_id: int) -> bytes | None:
        return next((key for key, value in self.index.items() if value == block_id), None)

    def allocate(self, num_blocks: int) -> list[int] | None:
        if num_blocks > len(self.free) + len(self.cached):
            return None
        block_ids = [(self.free or self.cached).pop(0) for _ in range(num_blocks)]
        for block_id in block_ids:
            self.references[block_id] = 1
            self.index.pop(self.hash_of(block_id) or b"", None)
        return block_ids

    def release(self, block_ids: list[int]) -> None:
        for block_id in reversed(block_ids):
            self.references[block_id] -= 1
            if self.references[block_id] == 0:
                if self.hash_of(block_id) is None:
                    self.free.insert(0, block_id)
                else:
                    self.cached.append(block_id)

    def acquire_prefix(self, hashes: list[bytes]) -> list[int]:
        block_ids = []
        for block_hash in hashes:
            if block_hash not in self.index:
                break
            block_id = self.index[block_hash]
            if self.references[block_id] == 0:
                self.cached.remove(block_id)
            self.references[block_id] += 1
            block_ids.append(block_id)
        return block_ids

    def clear_cache(self) -> int:
        cleared, self.cached = self.cached, []
        self.free += cleared
        self.index = {key: value for key, value in self.index.items() if value not in cleared}
        return len(cleared)


class PoolMachine(RuleBasedStateMachine):
    """Sequences with prompts over two token values, so that prefixes collide often."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, SECRET)
        self.naive = NaivePool()
        self.tables: list[tuple[list[int], list[bytes]]] = []

    @rule(
        values=st.lists(st.sampled_from([1, 2]), max_size=4),
        num_more=st.integers(0, 4),
        is_published=st.booleans(),
    )
    def start(self, values: list[int], num_more: int, is_published: bool) -> None:
        tokens = [value for value in values for _ in range(BLOCK_SIZE)]
        hashes = self.pool.hash_blocks(tokens)
        table = self.pool.acquire_prefix(hashes)
        assert table == self.naive.acquire_prefix(hashes)
        num_fresh = len(hashes) - len(table) + num_more
        fresh = self.pool.allocate(num_fresh)
        assert fresh == self.naive.allocate(num_fresh)
        if fresh is None:
            self.pool.free(table)
            self.naive.release(table)
            return
        table += fresh
        self.tables.append((table, hashes))
        if is_published:
            self.publish(len(self.tables) - 1)

    def publish(self, table_id: int) -> None:
        for block_id, block_hash in zip(*self.tables[table_id], strict=False):
            self.pool.publish(block_id, block_hash)
            if self.naive.hash_of(block_id) is None:
                self.naive.index.setdefault(block_hash, block_id)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish_later(self, data: st.DataObject) -> None:
        self.publish(data.draw(st.integers(0, len(self.tables) - 1)))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, hashes = data.draw(st.sampled_from(self.tables))
        self.pool.add_ref(table)
        for block_id in table:
            self.naive.references[block_id] += 1
        self.tables.append((list(table), hashes))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        self.naive.release(table)

    @rule()
    def clear_cache(self) -> None:
        assert self.pool.clear_cache() == self.naive.clear_cache()

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.naive.free)
        assert self.pool.num_cached == len(self.naive.cached)
        assert self.pool.num_available == self.pool.num_free + self.pool.num_cached
        assert self.pool.num_used == NUM_BLOCKS - self.pool.num_available
        found = {block_hash: self.pool.find(block_hash) for block_hash in self.naive.index}
        assert found == self.naive.index
        assert self.pool.find(bytes(16)) == -1
        references = [self.pool.ref_count(block_id) for block_id in range(NUM_BLOCKS)]
        assert references == self.naive.references


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)


def test_hashes_are_chained_and_keyed() -> None:
    pool = BlockPool(4, 2, SECRET)
    hashes = pool.hash_blocks([1, 2, 3, 4, 5])
    assert len(hashes) == 2
    assert {len(value) for value in hashes} == {16}
    assert pool.hash_blocks([3, 4], parent=hashes[0]) == hashes[1:]
    assert pool.hash_blocks([3, 4]) != hashes[1:]
    assert pool.hash_blocks([1, 2], extra=b"adapter") != hashes[:1]
    assert BlockPool(4, 2, bytes(16)).hash_blocks([1, 2]) != hashes[:1]


def test_sequences_of_any_kind_are_taken() -> None:
    pool = BlockPool(4, 2, SECRET)
    assert pool.hash_blocks((1, 2)) == pool.hash_blocks([1, 2]) == pool.hash_blocks(range(1, 3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda pool: pool.free([0]), NativeError, "block 0 is not in use"),
        (lambda pool: pool.free([9]), NativeError, "block 9 of 4"),
        (lambda pool: pool.hash_blocks([1 << 40]), NativeError, "doesn't fit 32 bits"),
        (lambda pool: pool.hash_blocks(["1", "2"]), TypeError, "integer"),
        (lambda pool: pool.free(3), TypeError, "sequence of ints"),
        (lambda pool: pool.publish(0, b"short"), NativeError, "16 bytes, not 5"),
        (lambda pool: BlockPool(4, 2, b"key"), NativeError, "16 bytes, not 3"),
        (lambda pool: BlockPool(0, 2, SECRET), NativeError, "num_blocks is 0"),
    ],
)
def test_wrong_calls_are_refused(call, error, message) -> None:
    pool = BlockPool(4, 2, SECRET)
    with pytest.raises(error, match=message):
        call(pool)
    pool.check_integrity()
    assert pool.num_free == 4
