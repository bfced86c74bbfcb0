"""Ranks that compute a model by torch: the answers of one process, and clear ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, UserError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig
from tests.checkpoints import cached_checkpoint
from tests.runners.test_ranks import REQUESTS, answers, assert_near, config_of

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(180)


def config(family: str, degree: int, **changes: object) -> EngineConfig:
    model = cached_checkpoint(family)
    return config_of(model, degree, device="torch-cpu", dtype="fp32", **changes)


@pytest.mark.parametrize(("family", "degrees"), [("llama3", (4,)), ("olmoe", (2,))])
def test_every_degree_gives_the_same_tokens(family: str, degrees: tuple[int, ...]) -> None:
    requests = REQUESTS[:2]
    whole = answers(config(family, 1), requests)
    for degree in degrees:
        assert_near(answers(config(family, degree), requests), whole)


def test_a_lost_rank_ends_requests_and_nothing_hangs() -> None:
    params = SamplingParams(max_new_tokens=400, ignore_eos=True, temperature=0)

    async def main() -> None:
        async with Engine(config("llama3", 2)) as engine:
            assert engine.info.runner.num_ranks == 2
            assert engine._parts is not None
            [process] = engine._parts.runner._ranks._processes  # type: ignore[attr-defined]
            events = engine.generate((5, 6, 7), params)
            await anext(events)
            process.kill()
            with pytest.raises(EngineError):
                async for _ in events:
                    pass
            assert not engine.healthy

    asyncio.run(asyncio.wait_for(main(), 100))


def test_what_ranks_by_torch_do_without_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="doesn't go with LoRA adapters"):
        answers(config("llama3", 2, lora=LoraConfig()), REQUESTS[:1])
    with pytest.raises(UserError, match="needs device=cpu in this version, not cuda"):
        config_of(tmp_path, 2, device="cuda")
