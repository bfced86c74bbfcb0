"""Which sequences share a padded batch."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmi_core.runners.transformers.padded_caches import Chunk, PaddedCaches
from lmi_core.runners.transformers.sparsity import partition


@pytest.mark.parametrize(
    ("lengths", "max_sparsity", "expected"),
    [
        ([38, 33, 24, 22], 0.33, [[0, 1, 2, 3]]),
        ([38, 33, 24, 22], 0.1, [[0, 1], [2, 3]]),
        ([38, 33, 24, 22], 0.01, [[0], [1], [2, 3]]),
        ([300, 50], 0.33, [[0], [1]]),
        ([50, 300], 0.33, [[1], [0]]),
        ([512, 500, 60, 58, 40, 8], 0.1, [[0, 1], [2, 3, 4, 5]]),
        ([512, 500, 60, 58, 40, 8], 0.01, [[0, 1], [2, 3, 4], [5]]),
        ([100, 100, 100], 0.0, [[0, 1, 2]]),
        ([1000, 10, 10, 10, 10], 0.01, [[0], [1, 2, 3, 4]]),
        ([27, 26, 18, 16, 14, 13, 12, 8, 7, 1], 0.01, [[0, 1], [2, 3, 4, 5, 6], [7, 8, 9]]),
        ([7], 0.0, [[0]]),
        ([], 0.33, []),
    ],
)
def test_known_partitions(lengths, max_sparsity, expected):
    assert partition(lengths, max_sparsity, 3) == expected


def padding(lengths, groups):
    return sum(max(lengths[i] for i in group) - lengths[j] for group in groups for j in group)


def contiguous(order, num_groups):
    for cuts in itertools.combinations(range(1, len(order)), num_groups - 1):
        bounds = [0, *cuts, len(order)]
        yield [order[a:b] for a, b in itertools.pairwise(bounds)]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=7),
    st.floats(0, 1),
    st.integers(1, 5),
)
def test_no_other_partition_is_better(lengths, max_sparsity, max_splits):
    groups = partition(lengths, max_sparsity, max_splits)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(groups)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    most = min(max_splits, len(lengths))
    least = {
        count: min(padding(lengths, other) for other in contiguous(order, count))
        for count in range(1, most + 1)
    }
    assert padding(lengths, groups) == least[len(groups)]
    fits = [count for count, cost in least.items() if cost <= max_sparsity * (cost + sum(lengths))]
    assert len(groups) == min(fits, default=most)


class Batches:
    """A model without a cache that notes which rows share a call."""

    device = torch.device("cpu")

    def __init__(self):
        self.rows = []

    def begin(self, rows):
        self.rows.append(list(rows))

    def __call__(self, ids, cache, num_logits, mask, positions):
        return torch.zeros(len(ids), num_logits, 4), cache


def test_prompts_are_grouped_with_what_decodes():
    """A prompt is computed with those that it will decode with, and nobody is regrouped then."""
    model = Batches()
    caches = PaddedCaches(model, max_sparsity=0.33, max_splits=3)
    caches.run([Chunk(0, [1] * 10, 0, 1)])
    long, short, near = Chunk(1, [1] * 90, 0, 1), Chunk(2, [1] * 9, 0, 1), Chunk(3, [1] * 12, 0, 1)
    caches.run([Chunk(0, [1], 10, 1), long, short, near])
    assert caches.groups == [[1], [3, 0, 2]]
    assert model.rows == [[0], [1], [0], [3, 2]]
    caches.run([Chunk(row, [1], n, 1) for row, n in ((0, 11), (1, 90), (2, 9), (3, 12))])
    assert model.rows[4:] == caches.groups == [[1], [3, 0, 2]]


def test_known_lengths_in_the_end_make_the_groups():
    """Who came with little and will have much shares with those like it, from the start on."""
    model = Batches()
    caches = PaddedCaches(model, max_sparsity=0.1, max_splits=3)
    long, grows = Chunk(0, [1] * 90, 0, 1, 100), Chunk(1, [1] * 8, 0, 1, 98)
    short, unknown = Chunk(2, [1] * 9, 0, 1, 12), Chunk(3, [1] * 11, 0, 1)
    caches.run([long, grows, short, unknown])
    assert caches.groups == [[0, 1], [2, 3]]
    caches.run([c._replace(token_ids=[1], start=len(c.token_ids)) for c in (long, grows, short)])
    assert caches.groups == [[0, 1], [2]]
