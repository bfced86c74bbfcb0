"""A model that ranks compute behind the server: a lost rank costs a pause, and no answer."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from lmi_core.copies.copies import Copies
from tests.server.harness import eventually, serving_models
from tests.server.models.test_copies import registry_of, texts

pytestmark = pytest.mark.timeout(120)


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


async def lose_a_rank(copies: Copies) -> None:
    """Return when the copy is another."""
    [old] = copies.copies
    [rank] = children_of(old.pid)
    os.kill(rank, signal.SIGKILL)
    await eventually(lambda: [copy.pid for copy in copies.copies] not in ([], [old.pid]), 30)


def test_the_group_restarts_and_its_requests_go_on() -> None:
    async def main() -> None:
        models = registry_of("num_threads=1", "device=cpu", "tensor_parallel_degree=2")
        async with models, serving_models(models) as served:
            copies = served.models.sole.loaded.backend
            assert isinstance(copies, Copies)
            reference = await texts(served)
            num_tokens = copies.num_tokens
            streams = asyncio.create_task(texts(served))
            await eventually(lambda: copies.num_tokens > num_tokens + 20, 30)
            await lose_a_rank(copies)
            assert await streams == reference
            await lose_a_rank(copies)  # while there is no request
            assert await texts(served) == reference

    asyncio.run(asyncio.wait_for(main(), 100))
