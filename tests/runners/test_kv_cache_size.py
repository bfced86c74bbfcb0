"""How several engines divide the machine's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmi_core import _native
from lmi_core.errors import InsufficientMemoryError
from lmi_core.runners.cpu.memory_needs import MemoryClaims
from lmi_core.runners.step_memory import size_kv_cache
from lmi_core.settings.engine_config import EngineConfig

LIMIT: int = _native.cpu_info()["memory_limit_bytes"]
BLOCK = 1 << 20


def size(
    *,
    claimed_bytes: int = 0,
    max_num_seqs: int = 16384,
    max_model_len: int = 4096,
    block_bytes: int = BLOCK,
    **settings: Any,
) -> int:
    """Bytes of the pool; so many sequences want all that there is."""
    config = EngineConfig(model=Path("x"), max_num_seqs=max_num_seqs, **settings)
    memory = size_kv_cache(
        config, block_bytes=block_bytes, max_model_len=max_model_len, claimed_bytes=claimed_bytes
    )
    return memory.num_bytes


def close_to(num_bytes: int) -> Any:
    return pytest.approx(num_bytes, abs=BLOCK)


def test_models_that_start_together_share_a_quarter() -> None:
    assert size() == close_to(LIMIT // 4)
    assert size(num_models=2) == close_to(LIMIT // 8)
    # The first of them has taken its part; the second gets the same.
    assert size(num_models=2, claimed_bytes=LIMIT // 8) == close_to(LIMIT // 8)


def test_a_model_that_comes_later_gets_a_part_of_what_is_left() -> None:
    assert size(claimed_bytes=LIMIT // 2) == close_to(LIMIT // 8)
    assert size(claimed_bytes=LIMIT // 2, max_num_seqs=1) == 128 * BLOCK
    with pytest.raises(InsufficientMemoryError, match="that no model has taken"):
        size(claimed_bytes=LIMIT)


def test_few_sequences_of_a_long_context_have_room_for_one() -> None:
    small = 4096
    assert size(max_num_seqs=2, max_model_len=4000, block_bytes=small) == 2 * 125 * small
    assert size(max_num_seqs=2, max_model_len=16384, block_bytes=small) == 512 * small
    with pytest.raises(InsufficientMemoryError, match="a quarter of the memory limit"):
        size(max_num_seqs=2, max_model_len=1 << 40)


def test_a_size_that_was_asked_for_must_be_there() -> None:
    assert size(kv_cache_bytes=256 * BLOCK, claimed_bytes=LIMIT // 2) == 256 * BLOCK
    with pytest.raises(InsufficientMemoryError, match="unload a model"):
        size(kv_cache_bytes=256 * BLOCK, claimed_bytes=LIMIT - 255 * BLOCK)


def test_claims_end_with_their_owner() -> None:
    claims, first, second = MemoryClaims(), object(), object()
    claims.claim(first, 5)
    claims.claim(second, 7)
    assert claims.others_bytes(None) == 12
    claims.release(first)
    claims.release(first)
    assert claims.others_bytes(None) == 7
