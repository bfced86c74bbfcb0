"""Who waits and who runs, and whose turn it is, so that one who asks for more doesn't get it at
others' expense.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", 2024): whoever
was served least comes next, and who comes back is taken to have had as much as the least of those
that are there. So nobody saves up, and what one doesn't use, others get.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable

from lmi_core.engine.sequence import ActiveRequest, Sequence, SequenceState

_GENERATED = 2.0
"""A generated token in tokens of a prompt: a row of 32 takes about twice a prompt's."""

_LEAD = 2048.0
"""By so much a tenant may have been served more than a heavy one and still be light."""

_BY_KEY: Callable[[Sequence], tuple[int, int, int]] = lambda sequence: sequence.key  # noqa: E731


class Queues:
    """Waiting and running sequences, both in the order of their keys, until when requests may wait,
    and what tenants were served, which counts while several have something open, and costs nothing
    while one has.

    Has no clock: callers say what time it is, in the seconds of ``ActiveRequest.arrival_s``."""

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_held = 0
        """Sequences that are in neither: they wait for a sibling."""
        self._of_tenants: dict[str, list[Sequence]] = {}
        """Those that wait, of tenants that have some."""
        self._num_open: Counter[str] = Counter()
        """Sequences, of tenants that have some."""
        self._served: dict[str, float] = {}
        self._light: frozenset[str] = frozenset()
        self._deadlines: list[tuple[float, int, ActiveRequest]] = []
        """A heap."""
        self._numbers = itertools.count()

    def wait(self, sequence: Sequence) -> None:
        """Queue a new or preempted sequence."""
        sequence.state = SequenceState.WAITING
        own = self._of_tenants.setdefault(sequence.request.request.tenant, [])
        for queue in (self.waiting, own):
            insort(queue, sequence, key=_BY_KEY)

    def leave(self, sequence: Sequence) -> None:
        """Take a waiting sequence out."""
        tenant = sequence.request.request.tenant
        for queue in (self.waiting, self._of_tenants[tenant]):
            del queue[bisect_left(queue, sequence.key, key=_BY_KEY)]
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]

    def hold(self, sequence: Sequence) -> None:
        """Keep a sequence, which is in neither queue, for a sibling to bring back."""
        sequence.state = SequenceState.HELD
        self.num_held += 1

    def run(self, sequence: Sequence) -> None:
        """Move a waiting or held sequence, which has its memory, to the running ones."""
        if sequence.state is SequenceState.HELD:
            self.num_held -= 1
        else:
            self.leave(sequence)
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=_BY_KEY)

    def limit(self, request: ActiveRequest) -> None:
        """Have a request begun in time, if it can't wait as long as it takes."""
        if request.deadline_s is not None:
            heapq.heappush(self._deadlines, (request.deadline_s, next(self._numbers), request))

    def is_due(self, now_s: float) -> bool:
        """Whether ``take_due`` has any."""
        heap = self._deadlines
        while heap and not heap[0][2].is_waiting:
            heapq.heappop(heap)
        return bool(heap) and heap[0][0] <= now_s

    def take_due(self, now_s: float) -> list[ActiveRequest]:
        """Requests that have waited to the end, each once."""
        due = []
        while self.is_due(now_s):
            due.append(heapq.heappop(self._deadlines)[2])
        return due

    @property
    def are_contested(self) -> bool:
        """Whether several tenants have something open."""
        return len(self._num_open) > 1

    def open(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            tenant = sequence.request.request.tenant
            if tenant not in self._num_open:
                self._return(tenant)
            self._num_open[tenant] += 1

    def close(self, sequence: Sequence) -> None:
        tenant = sequence.request.request.tenant
        self._num_open[tenant] -= 1
        if not self._num_open[tenant]:
            del self._num_open[tenant]

    def _return(self, tenant: str) -> None:
        least = min((self._served[other] for other in self._num_open), default=0.0)
        if not self._num_open:
            self._served.clear()
        absent = [other for other, served in self._served.items() if served < least]
        for other in absent:  # it would come back with as much
            del self._served[other]
        self._served[tenant] = max(least, self._served.get(tenant, 0.0))

    def note_admitted(self, sequence: Sequence) -> None:
        """Its prompt will be computed; that of one that was preempted was counted before."""
        if self.are_contested and not sequence.num_generated:
            self._served[sequence.request.request.tenant] += sequence.num_pending

    def note_generated(self, sequence: Sequence) -> None:
        """A token of its output."""
        if self.are_contested:
            self._served[sequence.request.request.tenant] += _GENERATED

    def order(self, sequence: Sequence) -> tuple[int, float, int, tuple[int, int, int]]:
        """Who comes first: by priority, by what the tenant was served and has open, by arrival;
        of a priority, light tenants' in the order of arrival before all others."""
        tenant = sequence.request.request.tenant
        if tenant in self._light:
            return sequence.key[0], -1.0, 0, sequence.key
        return sequence.key[0], self._served[tenant], self._num_open[tenant], sequence.key

    def first(self) -> Sequence:
        """Of those that wait, at least one."""
        if not self.are_contested:
            return self.waiting[0]
        priority = self.waiting[0].key[0]
        firsts = [own[0] for own in self._of_tenants.values()]
        return min((s for s in firsts if s.key[0] == priority), key=self.order)

    def last(self) -> Sequence:
        """Who gives way of those that run, at least one: of the least priority, the newest of the
        tenant that runs most."""
        if not self.are_contested:
            return self.running[-1]
        counts = self._num_running()
        return max(self.running, key=lambda s: (s.key[0], counts[s.request.request.tenant], s.key))

    def _num_running(self) -> Counter[str]:
        return Counter(sequence.request.request.tenant for sequence in self.running)

    def heavy(self, num_rows: int) -> frozenset[Sequence]:
        """Find who is light: who has no more open than half of a tenant's part of ``num_rows``
        beside heavy ones, who run more than that, and wasn't served more lately. Returns what runs
        of the heavy ones while somebody is light, but for searches, whose sequences stay together.
        """
        self._light = frozenset()
        if not self.are_contested:
            return frozenset()
        part = max(1, num_rows // len(self._num_open))
        counts = self._num_running()
        heavy = {tenant for tenant, count in counts.items() if count > part}
        most = min((self._served[tenant] for tenant in heavy), default=0.0) + _LEAD
        self._light = frozenset(
            tenant
            for tenant, num_open in self._num_open.items()
            if heavy and 2 * num_open <= part and self._served[tenant] <= most
        )
        if not self._light:
            return frozenset()
        return frozenset(
            sequence
            for sequence in self.running
            if sequence.request.request.tenant in heavy and sequence.request.search is None
        )

    def is_light(self, sequence: Sequence) -> bool:
        """By what ``heavy`` has found last."""
        return sequence.request.request.tenant in self._light

    def creditor(self, num_rows: int) -> Sequence | None:
        """Who of several tenants' gives its row to the first that waits: that one's tenant has less
        than its part of ``num_rows``, the other one's more, and it wouldn't be the other way round
        afterwards."""
        sequence, victim = self.first(), self.last()
        if victim.key[0] < sequence.key[0]:
            return None
        counts = self._num_running()
        num_own = counts[sequence.request.request.tenant]
        num_other = counts[victim.request.request.tenant]
        part = num_rows / len(self._num_open)
        return victim if num_own + 1 <= part < num_other and num_own + 1 < num_other else None
