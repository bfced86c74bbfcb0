"""What a step is planned of and as: who waits and runs, and who has how many tokens in it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.model_drafts import DraftChain
from lmi_core.engine.sequence import ActiveRequest, Sequence, SequenceState

_BY_KEY: Callable[[Sequence], tuple[int, int, int]] = lambda sequence: sequence.key  # noqa: E731


@dataclass(slots=True)
class Plan:
    """One step: ``num_scheduled`` of each sequence says how many of its tokens it computes."""

    sequences: list[Sequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) blocks copied before the forward pass."""
    num_tokens: int = 0
    num_following: int = 0
    """Leading ``sequences`` of a step submitted ahead whose tokens are of the one before."""
    num_prompt_tokens: int = 0
    """Those of ``num_tokens`` that aren't of decoding sequences."""
    num_preempted: int = 0
    wants_states: bool = False
    """Whether the step's hidden states are of interest; never of a step submitted ahead."""
    chain: DraftChain | None = None
    """Draft steps that run before it, and give some of its tokens."""
    failures: list[tuple[Sequence, Exception]] = field(default_factory=list)
    """Sequences that planning itself failed for; they are in none of the lists above."""
    behind: Items[Sequence] = ()
    """Those in flight in the step before, of which it is planned as if it had gone well."""
    must_wait: bool = False
    """Whether somebody would come in who has to know what that step gives; for nobody else."""
    expired: list[ActiveRequest] = field(default_factory=list)
    """Requests that waited for too long and were ended; they are in none of the lists above."""

    def take_copy(self, sequence: Sequence) -> None:
        """Have the block copied that the sequence goes on in, if it needs one."""
        if sequence.copy is not None:
            self.copies.append(sequence.copy)
            sequence.copy = None

    @property
    def chain_s(self) -> float:
        """Seconds that the worker spent on the chain, once it is done."""
        return 0.0 if self.chain is None else self.chain.seconds


@dataclass(slots=True)
class Queues:
    """Waiting and running sequences, both in the order of their keys."""

    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    num_held: int = 0
    """Sequences that are in neither: they wait for a sibling."""
    _of_tenants: dict[str, list[Sequence]] = field(default_factory=dict)
    """Those that wait, of tenants that have some."""

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

    def firsts(self) -> list[Sequence]:
        """The first of each tenant that waits."""
        return [own[0] for own in self._of_tenants.values()]

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


def preempt(queues: Queues, memory: KvMemory, sequence: Sequence) -> None:
    """Take a running sequence's memory, and its gang's; it waits to be computed again."""
    first, *others = sequence.gang
    if first.request.search is not None:
        first.request.search.forget(first.token_ids)
    for member in (first, *others):
        queues.running.remove(member)
        memory.release(member)
    queues.wait(first)
    for member in others:
        queues.hold(member)
