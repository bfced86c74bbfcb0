"""Copies with devices of their own, played by torch on the CPU: each sees its own alone."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_core.copies.copies import Copies
from lmi_core.copies.machines import Devices
from lmi_core.engine.engine import Engine
from lmi_core.errors import UserError
from tests.copies.test_copies import CONFIG
from tests.copies.test_other_machines import requests
from tests.engine.harness import until

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(180)


def variables_of(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


async def tokens(engine: Engine | Copies, number: int) -> list[int]:
    [request] = requests(1, length=12)
    request = replace(request, request_id=str(number))
    return [event.token_id async for batch in engine.generate_batches(request) for event in batch]


def test_each_copy_sees_its_device_and_another_takes_over() -> None:
    config = replace(CONFIG, device="torch-cpu", dtype="fp32", deterministic=True)
    machines = Devices([{"CUDA_VISIBLE_DEVICES": name} for name in ("4", "GPU-1b5c")])

    async def main() -> None:
        async with Copies(config, 2, machines=machines) as copies:
            first, second = copies.copies
            assert b"CUDA_VISIBLE_DEVICES=4" in variables_of(first.pid)
            assert b"CUDA_VISIBLE_DEVICES=GPU-1b5c" in variables_of(second.pid)
            with pytest.raises(UserError, match="num_copies=3, and there are devices for 2"):
                await copies.scale(3, 3)
            undisturbed = await tokens(copies, 0)
            num_tokens = copies.num_tokens
            answers = asyncio.gather(*(tokens(copies, 1 + i) for i in range(4)))
            await until(lambda: copies.num_tokens > num_tokens + 8)
            first.kill()
            assert await answers == [undisturbed] * 4
            assert len(undisturbed) == 12

    asyncio.run(asyncio.wait_for(main(), 150))
