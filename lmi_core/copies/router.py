"""Which copy runs which request: a state machine without input, output or clock.

A request goes to the copy for which it means the least work: the tokens that the copy still has to
compute and those of the prompt that it hasn't in its prefix cache. It waits here until a copy has
room, by priority, by what its tenant was served, and by arrival, and comes back when its copy is
lost.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Sequence

AFFINITY = 4
"""A prompt's token that must be computed counts as so many that a copy has to compute anyway: what
is cached twice takes the place of something else."""
_GENERATED = 2.0
"""A generated token in tokens of a prompt."""


class Entry:
    """A request as the router sees it."""

    __slots__ = (
        "copy_id",
        "hashes",
        "key",
        "left_id",
        "num_left",
        "num_output_tokens",
        "num_prompt_tokens",
        "num_seqs",
        "num_uncached",
        "number",
        "session",
        "tenant",
        "was_given",
    )

    def __init__(
        self,
        number: int,
        *,
        priority: int = 0,
        tenant: str = "",
        num_seqs: int = 1,
        num_prompt_tokens: int,
        num_output_tokens: int,
        hashes: Sequence[bytes] = (),
        session: str = "",
    ) -> None:
        """``num_output_tokens``: expected of all its sequences; ``hashes``: of the prompt's full
        blocks; ``session``: whose conversation a copy keeps."""
        self.number = number
        self.key = (priority, number)
        self.tenant = tenant
        self.num_seqs = num_seqs
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = num_output_tokens
        self.hashes = hashes
        self.session = session
        self.copy_id: int | None = None
        """None: it waits."""
        self.left_id: int | None = None
        """The copy that its session has left for this one."""
        self.num_uncached = 0
        """Prompt tokens that its copy still has to compute."""
        self.num_left = 0
        """Output tokens that are still expected."""
        self.was_given = False
        """To a copy, be it one that was lost."""


def _by_key(entry: Entry) -> tuple[int, int]:
    return entry.key


class _Copy:
    """A copy's load and, as far as is known here, what its prefix cache holds."""

    __slots__ = ("blocks", "entries", "load", "num_blocks", "num_of", "num_seqs", "room", "takes")

    def __init__(self, room: int, num_blocks: int) -> None:
        self.room = room
        self.num_blocks = num_blocks
        self.takes = True
        self.load = 0
        """Tokens to compute."""
        self.num_seqs = 0
        self.num_of: Counter[str] = Counter()
        """Sequences by tenant."""
        self.entries: dict[int, Entry] = {}
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of cached blocks, least recent first."""

    def has_room(self, entry: Entry, num_tenants: int) -> bool:
        """Also where the others have taken the tenant's part, which the copy gives to it."""
        own = self.num_of[entry.tenant] + entry.num_seqs
        is_within = not self.num_seqs or self.num_seqs + entry.num_seqs <= self.room
        return self.takes and (is_within or (num_tenants > 1 and own <= self.room / num_tenants))

    def num_cached(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks that are there."""
        blocks = self.blocks
        for count, block in enumerate(hashes):
            if block not in blocks:
                return count
        return len(hashes)

    def note_blocks(self, hashes: Sequence[bytes]) -> None:
        """They are used: a prefix' head is evicted after its tail."""
        blocks = self.blocks
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self.num_blocks:
            blocks.popitem(last=False)


class Router:
    """Requests by number, copies by id."""

    def __init__(self, block_size: int, affinity: int = AFFINITY) -> None:
        self._block_size = block_size
        self._affinity = affinity
        self._copies: dict[int, _Copy] = {}
        self._waiting: list[Entry] = []
        self.num_seqs = 0
        """Of all requests, waiting ones included."""
        self.num_tokens = 0
        """Of their prompts, and expected of their outputs."""
        self._num_open: Counter[str] = Counter()
        """Requests by tenant."""
        self._served: dict[str, float] = {}
        """Tokens of tenants, as ``engine/queues.py`` counts them."""
        self._homes: dict[str, int] = {}
        """The copies that keep the conversations of sessions."""

    @property
    def num_waiting(self) -> int:
        """Requests that no copy has."""
        return len(self._waiting)

    @property
    def copy_ids(self) -> list[int]:
        return list(self._copies)

    def load_of(self, copy_id: int) -> int:
        """Tokens that a copy still has to compute."""
        return self._copies[copy_id].load

    def requests_of(self, copy_id: int) -> list[Entry]:
        return list(self._copies[copy_id].entries.values())

    def add_copy(self, copy_id: int, *, room: int, num_blocks: int) -> None:
        """A copy takes requests, of at most ``room`` sequences together, or one of more."""
        assert copy_id not in self._copies
        self._copies[copy_id] = _Copy(room, num_blocks)

    def close_copy(self, copy_id: int) -> None:
        """It gets no more requests."""
        self._copies[copy_id].takes = False

    def reopen_copy(self, copy_id: int) -> None:
        """It gets requests again."""
        self._copies[copy_id].takes = True

    def remove_copy(self, copy_id: int) -> list[Entry]:
        """A copy is gone; what it had waits again, in its old place."""
        lost = list(self._copies.pop(copy_id).entries.values())
        self._homes = {name: home for name, home in self._homes.items() if home != copy_id}
        for entry in lost:
            entry.copy_id = None
            insort(self._waiting, entry, key=_by_key)
        return lost

    def end_session(self, session: str) -> None:
        """No copy keeps anything for it any more. Idempotent."""
        self._homes.pop(session, None)

    def put(self, entry: Entry) -> None:
        """A new request."""
        self.num_seqs += entry.num_seqs
        self.num_tokens += entry.num_prompt_tokens + entry.num_output_tokens
        if not self._num_open[entry.tenant]:
            others = [self._served[one] for one in self._num_open if one != entry.tenant]
            had = self._served.get(entry.tenant, 0.0) if others else 0.0
            self._served[entry.tenant] = max(min(others, default=0.0), had)
        self._num_open[entry.tenant] += 1
        insort(self._waiting, entry, key=_by_key)

    def assign(self) -> list[tuple[Entry, int]]:
        """Requests and the copies that they go to now."""
        assigned = []
        while (following := self._next()) is not None:
            entry, copy_id = following
            self._waiting.remove(entry)
            self._give(entry, copy_id)
            assigned.append((entry, copy_id))
        return assigned

    def note_token(self, entry: Entry) -> None:
        """Its copy has given a token of it."""
        if entry.copy_id is None:
            return
        num_done = entry.num_uncached
        entry.num_uncached = 0
        if len(self._num_open) > 1:
            self._served[entry.tenant] += _GENERATED
        if entry.num_left:
            entry.num_left -= 1
            num_done += 1
        self._copies[entry.copy_id].load -= num_done

    def finish(self, entry: Entry, hashes: Sequence[bytes] = ()) -> None:
        """It has ended, wherever it was; ``hashes``: of all full blocks that it leaves behind."""
        self.num_seqs -= entry.num_seqs
        self.num_tokens -= entry.num_prompt_tokens + entry.num_output_tokens
        self._num_open[entry.tenant] -= 1
        if not self._num_open[entry.tenant]:
            del self._num_open[entry.tenant]
            if not self._num_open:
                self._served.clear()
        if entry.copy_id is None:
            self._waiting.remove(entry)
            return
        copy = self._copies[entry.copy_id]
        del copy.entries[entry.number]
        copy.num_seqs -= entry.num_seqs
        copy.num_of[entry.tenant] -= entry.num_seqs
        if not copy.num_of[entry.tenant]:
            del copy.num_of[entry.tenant]
        copy.load -= entry.num_uncached + entry.num_left
        copy.note_blocks(hashes)

    def _next(self) -> tuple[Entry, int] | None:
        """The request that comes first of those that a copy takes now: by priority, by what its
        tenant was served, by arrival."""
        for entry in self._heads():
            copy_id = self._best(entry)
            if copy_id is not None:
                return entry, copy_id
        return None

    def _heads(self) -> list[Entry]:
        """Of the least priority, the first of each tenant."""
        waiting = self._waiting
        if len(self._num_open) < 2:
            return waiting[:1]
        heads: dict[str, Entry] = {}
        for entry in waiting:
            if entry.key[0] != waiting[0].key[0] or len(heads) == len(self._num_open):
                break
            heads.setdefault(entry.tenant, entry)
        return sorted(heads.values(), key=lambda entry: (self._served[entry.tenant], entry.key))

    def _best(self, entry: Entry) -> int | None:
        best, least, num_tenants = None, 0, len(self._num_open)
        for copy_id, copy in self._copies.items():
            if not copy.has_room(entry, num_tenants):
                continue
            is_home = bool(entry.session) and self._homes.get(entry.session) == copy_id
            num_uncached = 0 if is_home else self._num_uncached(entry, copy)
            cost = copy.load + self._affinity * num_uncached
            if best is None or cost < least:
                best, least = copy_id, cost
        return best

    def _num_uncached(self, entry: Entry, copy: _Copy) -> int:
        return entry.num_prompt_tokens - copy.num_cached(entry.hashes) * self._block_size

    def _give(self, entry: Entry, copy_id: int) -> None:
        copy = self._copies[copy_id]
        entry.copy_id = copy_id
        if entry.session:
            home = self._homes.get(entry.session)
            entry.left_id = None if home == copy_id else home
            self._homes[entry.session] = copy_id
        entry.num_uncached = self._num_uncached(entry, copy)
        entry.num_left = entry.num_output_tokens
        copy.entries[entry.number] = entry
        copy.num_seqs += entry.num_seqs
        copy.num_of[entry.tenant] += entry.num_seqs
        if not entry.was_given and len(self._num_open) > 1:
            self._served[entry.tenant] += entry.num_prompt_tokens
        entry.was_given = True
        copy.load += entry.num_uncached + entry.num_left
        copy.note_blocks(entry.hashes)
