"""Memory that several models want at once is given to those who find room."""

import threading

import pytest

from lmi_core.errors import InsufficientMemoryError
from lmi_core.runners.cpu.memory_needs import Estimate, MemoryClaims
from lmi_core.runners.step_memory import KvCacheSize


def _needs(num_bytes: int) -> Estimate:
    blocks = KvCacheSize(0, 0, "")
    return Estimate(weights=num_bytes, kv_cache=0, blocks=blocks, workspace=0, stored=0)


def test_nobody_claims_between_a_look_and_its_claim() -> None:
    claims, refused = MemoryClaims(), []
    barrier, looked = threading.Barrier(8), threading.Event()

    def check(others: int) -> Estimate:
        looked.wait(0.01)  # as long as files are read
        if others + 30 > 100:
            raise InsufficientMemoryError("no room")
        return _needs(30)

    def claim(owner: object) -> None:
        barrier.wait()
        try:
            claims.claim_checked(owner, check)
        except InsufficientMemoryError:
            refused.append(owner)

    owners = [object() for _ in range(8)]
    threads = [threading.Thread(target=claim, args=(owner,)) for owner in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (claims.others_bytes(None), len(refused)) == (90, 5)
    held = next(owner for owner in owners if owner not in refused)
    assert claims.others_bytes(held) == 60
    with pytest.raises(InsufficientMemoryError):
        claims.claim_checked(refused[0], check)
    claims.claim_checked(held, lambda others: _needs(100 - others))  # its own does not count
    assert claims.others_bytes(None) == 100
    claims.release(held)
    assert claims.others_bytes(None) == 60
