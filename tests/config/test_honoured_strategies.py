"""Options of decoding strategies change what they say."""

from __future__ import annotations

import asyncio
from typing import Any

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from tests.engine.harness import collect, token_ids


def test_states_that_contrastive_search_compares(configured: Any) -> None:
    async def texts(states: str) -> list[list[int]]:
        config = configured(f"option.contrastive_states={states}\noption.dtype=fp32\n")
        params = SamplingParams(max_new_tokens=24, penalty_alpha=0.6, top_k=4)
        async with Engine(config) as engine:
            return [token_ids(await collect(engine, [i, 50 + i], params)) for i in range(3, 9)]

    both = [asyncio.run(texts(states)) for states in ("embedding", "last_layer")]
    assert both[0] != both[1]


def test_contrastive_search_by_default_wants_steps_that_give_states(configured: Any) -> None:
    """On GPUs Python launches those (tests/runners/device/test_cuda_runner.py)."""
    for strategy in ("contrastive", "sample"):
        config = configured(f"option.decoding_strategy={strategy}\n")
        assert config.gives_states == (strategy == "contrastive")


def test_ops_that_nothing_has_are_said(model_dir: Any, explained: Any) -> None:
    written = model_dir("option.device=torch-cpu\n")
    report = explained(written, "--prefer-native", environ={"LMI_OPS": "attention:magic"})
    assert ["LMI_OPS has 'attention:magic'" in str(error) for error in report.errors] == [True]
    assert not explained(model_dir("option.device=cpu\n"), environ={"LMI_OPS": "magic"}).errors
