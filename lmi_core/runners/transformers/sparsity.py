"""The max-sparsity rule: which sequences share a padded batch.

Source: DJL-Serving's djl_python/seq_scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def partition(lengths: Sequence[int], max_sparsity: float, max_splits: int) -> list[list[int]]:
    """Indices of ``lengths`` in the fewest groups whose padding is at most ``max_sparsity``.

    A group is padded to its longest sequence; the sparsity is padding / (padding + tokens). There
    are never more than ``max_splits`` groups, even if their padding is more: more forward calls
    would cost more than memory. Groups are in descending order of length.
    """
    if not lengths:
        return []
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    descending = [lengths[i] for i in order]
    num_tokens = sum(descending)
    most = min(max_splits, len(order))
    for bounds, padding in _best_cuts(descending, most):
        if padding <= max_sparsity * (padding + num_tokens) or len(bounds) - 1 == most:
            return [order[a:b] for a, b in pairwise(bounds)]
    return []


def _best_cuts(descending: list[int], most: int) -> list[tuple[list[int], int]]:
    """For 1, 2, ... ``most`` groups: where the best ones begin and end, and their padding.

    Sorted sequences are best grouped contiguously, so that this is dynamic programming over the
    start of the last group.
    """
    count = len(descending)
    sums = [0, *accumulate(descending)]

    def padding(start: int, stop: int) -> int:
        return (stop - start) * descending[start] - (sums[stop] - sums[start])

    costs = [padding(0, stop) if stop else 0 for stop in range(count + 1)]
    bounds = [[0, stop] for stop in range(count + 1)]
    best = [(bounds[count], costs[count])]
    for num_groups in range(2, most + 1):
        starts = [
            min(
                range(num_groups - 1, stop),
                key=lambda start: costs[start] + padding(start, stop),
                default=0,
            )
            for stop in range(count + 1)
        ]
        bounds = [[*bounds[start], stop] for stop, start in enumerate(starts)]
        costs = [
            costs[start] + padding(start, stop) if stop >= num_groups else 0
            for stop, start in enumerate(starts)
        ]
        best.append((bounds[count], costs[count]))
    return best
