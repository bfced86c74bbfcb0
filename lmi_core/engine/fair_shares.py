"""What each tenant was served, so that one who asks for more doesn't get it at others' expense.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", 2024): whoever
was served least comes next, and who comes back is taken to have had as much as the least of those
that are there. So nobody saves up, and what one doesn't use, others get.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lmi_core.engine.policy import Queues
from lmi_core.engine.sequence import Sequence

_GENERATED = 2.0
"""A generated token in tokens of a prompt: a row of 32 takes about twice a prompt's."""

_LEAD = 2048.0
"""By so much a tenant may have been served more than a heavy one and still be light."""


class FairShares:
    """Counts while several tenants have something open, and costs nothing while one has."""

    def __init__(self) -> None:
        self._num_open: Counter[str] = Counter()
        """Sequences, of tenants that have some."""
        self._served: dict[str, float] = {}
        self._light: frozenset[str] = frozenset()

    @property
    def are_contested(self) -> bool:
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

    def first(self, queues: Queues) -> Sequence:
        """Of those that wait, at least one."""
        if not self.are_contested:
            return queues.waiting[0]
        priority = queues.waiting[0].key[0]
        return min((s for s in queues.firsts() if s.key[0] == priority), key=self.order)

    def last(self, running: Iterable[Sequence]) -> Sequence | None:
        """Who gives way: of the least priority, the newest of the tenant that runs most."""
        sequences = list(running)
        counts = Counter(sequence.request.request.tenant for sequence in sequences)
        return max(
            sequences,
            key=lambda s: (s.key[0], counts[s.request.request.tenant], s.key),
            default=None,
        )

    def heavy(self, running: list[Sequence], num_rows: int) -> frozenset[Sequence]:
        """Find who is light: who has no more open than half of a tenant's part of ``num_rows``
        beside heavy ones, who run more than that, and wasn't served more lately. Returns what runs
        of the heavy ones while somebody is light, but for searches, whose sequences stay together.
        """
        self._light = frozenset()
        if not self.are_contested:
            return frozenset()
        part = max(1, num_rows // len(self._num_open))
        counts = Counter(sequence.request.request.tenant for sequence in running)
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
            for sequence in running
            if sequence.request.request.tenant in heavy and sequence.request.search is None
        )

    def is_light(self, sequence: Sequence) -> bool:
        """By what ``heavy`` has found last."""
        return sequence.request.request.tenant in self._light

    def creditor(
        self, sequence: Sequence, running: list[Sequence], num_rows: int
    ) -> Sequence | None:
        """Who gives its row to ``sequence``, which waits for one: its tenant has less than its part
        of ``num_rows``, the other one's more, and it wouldn't be the other way round afterwards."""
        if not self.are_contested:
            return None
        victim = self.last(running)
        if victim is None or victim.key[0] < sequence.key[0]:
            return None
        tenants = [each.request.request.tenant for each in running]
        num_own = tenants.count(sequence.request.request.tenant)
        num_other = tenants.count(victim.request.request.tenant)
        part = num_rows / len(self._num_open)
        return victim if num_own + 1 <= part < num_other and num_own + 1 < num_other else None
