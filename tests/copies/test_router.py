"""The router alone: random histories of arrivals, tokens, ends, losses and returns of copies."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lmi_core.copies.router import Entry, Router

BLOCK = 4


def entry(
    number: int,
    *,
    hashes: tuple[bytes, ...] = (),
    priority: int = 0,
    n: int = 1,
    tenant: str = "",
    session: str = "",
) -> Entry:
    return Entry(
        number,
        session=session,
        priority=priority,
        tenant=tenant,
        num_seqs=n,
        num_prompt_tokens=len(hashes) * BLOCK + 2,
        num_output_tokens=8,
        hashes=hashes,
    )


def blocks(text: str) -> tuple[bytes, ...]:
    return tuple(text[: i + 1].encode() for i in range(len(text)))


def router_of(num_copies: int, *, room: int = 8, num_blocks: int = 100) -> Router:
    router = Router(BLOCK)
    for copy_id in range(num_copies):
        router.add_copy(copy_id, room=room, num_blocks=num_blocks)
    return router


def test_the_least_loaded_copy_gets_the_next_request() -> None:
    router = router_of(2)
    for number in range(4):
        router.put(entry(number))
        [(_, copy_id)] = router.assign()
        assert copy_id == number % 2


def test_a_conversation_goes_on_where_its_prefix_is() -> None:
    router = router_of(3)
    for number, text in enumerate(("abcdef", "mnopqr", "uvwxyz")):
        router.put(entry(number, hashes=blocks(text)))
    homes = {one.hashes[0]: copy_id for one, copy_id in router.assign()}
    assert len(set(homes.values())) == 3
    for number, text in enumerate(("uvwxyz12", "abcdef34", "mnopqr56"), start=3):
        router.put(entry(number, hashes=blocks(text)))
        [(one, copy_id)] = router.assign()
        assert copy_id == homes[one.hashes[0]]
        assert one.num_uncached == 2 * BLOCK + 2


def test_a_session_goes_on_where_its_conversation_is_kept() -> None:
    """Also where the router takes its blocks for evicted."""
    router = router_of(3, num_blocks=2)
    router.put(entry(0, hashes=blocks("ab"), session="s"))
    [(first, home)] = router.assign()
    router.finish(first)
    for number in range(1, 10):
        router.put(entry(number, hashes=blocks(f"{number}xyz")))
        [(other, _)] = router.assign()
        router.finish(other)
    router.put(entry(10, hashes=blocks("abcd"), session="s"))
    [(second, copy_id)] = router.assign()
    assert (copy_id, second.left_id) == (home, None)
    router.finish(second)
    router.close_copy(home)
    router.put(entry(11, hashes=blocks("abcd"), session="s"))
    [(third, copy_id)] = router.assign()
    assert (copy_id != home, third.left_id) == (True, home)
    router.remove_copy(copy_id)
    [(again, copy_id)] = router.assign()
    assert (again, again.left_id) == (third, None)
    router.end_session("s")
    router.end_session("s")


def test_affinity_ends_where_a_copy_has_far_more_to_do() -> None:
    router = router_of(2, room=100)
    router.put(entry(0, hashes=blocks("abc")))
    [(_, home)] = router.assign()
    choices = []
    for number in range(1, 20):
        router.put(entry(number, hashes=blocks("abc")))
        choices += [copy_id for _, copy_id in router.assign()]
    assert choices[0] == home
    assert set(choices) == {0, 1}


def test_what_was_evicted_is_no_reason() -> None:
    router = router_of(1, num_blocks=4)
    for number, text in enumerate(("abcd", "wxyz")):
        router.put(entry(number, hashes=blocks(text)))
        router.assign()
    again = entry(2, hashes=blocks("abcd"))
    router.put(again)
    router.assign()
    assert again.num_uncached == again.num_prompt_tokens


def test_requests_wait_for_room_in_the_order_of_priority_and_arrival() -> None:
    router = router_of(1, room=1)
    requests = [entry(0), entry(1), entry(2, priority=-1)]
    for request in requests:
        router.put(request)
    order = []
    while assigned := router.assign():
        [(request, _)] = assigned
        order.append(request.number)
        router.finish(request)
    assert order == [2, 0, 1]


def test_a_request_with_more_choices_than_rows_has_a_copy_for_itself() -> None:
    router = router_of(1, room=4)
    large, small = entry(0, n=9), entry(1)
    router.put(large)
    router.put(small)
    assert [request.number for request, _ in router.assign()] == [0]
    router.finish(large)
    assert [request.number for request, _ in router.assign()] == [1]


def test_a_tenant_does_not_wait_behind_all_that_another_has_sent() -> None:
    router = router_of(2, room=4)
    for number in range(30):
        router.put(entry(number, tenant="loud"))
    router.assign()
    quiet = entry(30, tenant="quiet")
    router.put(quiet)
    assert [request for request, _ in router.assign()] == [quiet]
    for number in range(31, 34):
        router.put(entry(number, tenant="quiet"))
    given = {request.number for request, _ in router.assign()}
    assert given == {31, 32, 33}
    router.put(entry(34, tenant="quiet"))
    assert router.assign() == []
    for copy_id in router.copy_ids:
        for request in router.requests_of(copy_id):
            router.note_token(request)
    for copy_id in router.copy_ids:
        loud = [one for one in router.requests_of(copy_id) if one.tenant == "loud"]
        for request in loud[:3]:
            router.finish(request)
    tenants = [request.tenant for request, _ in router.assign()]
    assert set(tenants) == {"loud", "quiet"}


def test_tenants_get_alike_of_several_copies_whatever_they_ask_for() -> None:
    """One has eight times the requests, and came first; a copy gives each of its rows a token."""
    router, rng = router_of(3, room=5), random.Random(0)
    left: dict[Entry, int] = {}
    served: Counter[str] = Counter()
    for number, tenant in enumerate("a" * 400 + "bcdefgh" * 50):
        router.put(entry(number, tenant=tenant, hashes=blocks("xyz"[: rng.randrange(4)])))
    for _ in range(150):
        for request, _ in router.assign():
            left[request] = rng.randint(4, 30)
        for copy_id in router.copy_ids:
            for request in router.requests_of(copy_id)[:4]:
                router.note_token(request)
                served[request.tenant] += 1
                left[request] -= 1
                if not left[request]:
                    router.finish(request, request.hashes)
    index = served.total() ** 2 / (8 * sum(count * count for count in served.values()))
    assert index > 0.95, served


class History:
    """A router, and what a reader of each request has seen."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.router = router_of(0)
        self.open: dict[int, Entry] = {}
        self.num_ends: dict[int, int] = {}
        self.up: set[int] = set()
        self.closed: set[int] = set()
        self.num_copies = self.num_requests = 0

    def arrive(self) -> None:
        hashes = blocks(self.random.choice(("abcdefgh", "abcdxyz", "q")))
        n, tenant = self.random.choice((1, 1, 1, 3)), self.random.choice(("a", "b", "b", "b", ""))
        priority = self.random.randrange(2)
        new = entry(self.num_requests, hashes=hashes, priority=priority, n=n, tenant=tenant)
        self.num_requests += 1
        self.open[new.number] = new
        self.num_ends[new.number] = 0
        self.router.put(new)

    def token(self) -> None:
        if self.open:
            self.router.note_token(self.random.choice(list(self.open.values())))

    def end(self) -> None:
        """Of one that runs, or, as a client that leaves, of one that waits."""
        if self.open:
            number = self.random.choice(list(self.open))
            request = self.open.pop(number)
            self.router.finish(request, request.hashes)
            self.num_ends[number] += 1

    def start(self) -> None:
        if len(self.up) < 4:
            self.router.add_copy(self.num_copies, room=self.random.randint(1, 5), num_blocks=6)
            self.up.add(self.num_copies)
            self.num_copies += 1

    def lose(self) -> None:
        if self.up:
            copy_id = self.random.choice(sorted(self.up))
            self.up.remove(copy_id)
            self.closed.discard(copy_id)
            for lost in self.router.remove_copy(copy_id):
                assert lost.copy_id is None

    def close(self) -> None:
        if self.up:
            copy_id = self.random.choice(sorted(self.up))
            self.router.close_copy(copy_id)
            self.closed.add(copy_id)

    def assign(self) -> None:
        for request, copy_id in self.router.assign():
            assert copy_id in self.up - self.closed
            assert self.open[request.number] is request

    def check(self) -> None:
        running = [e for copy_id in self.up for e in self.router.requests_of(copy_id)]
        assert len(running) + self.router.num_waiting == len(self.open)
        assert {e.number for e in running} <= self.open.keys()
        assert self.router.num_seqs == sum(e.num_seqs for e in self.open.values())
        num_tokens = sum(e.num_prompt_tokens + e.num_output_tokens for e in self.open.values())
        assert self.router.num_tokens == num_tokens
        for copy_id in self.up:
            left = [e.num_uncached + e.num_left for e in self.router.requests_of(copy_id)]
            assert self.router.load_of(copy_id) == sum(left)
            assert all(number >= 0 for number in left)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_whatever_happens_to_copies(seed: int) -> None:
    history = History(seed)
    moves = [history.arrive] * 4 + [history.token] * 6 + [history.end] * 3 + [history.assign] * 4
    moves += [history.start] * 2 + [history.lose, history.close]
    for _ in range(400):
        history.random.choice(moves)()
        history.check()
    history.start()
    while history.open:
        history.start()
        history.assign()
        history.end()
        history.check()
    assert set(history.num_ends.values()) == {1}
