"""Which sequences share a padded batch."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
