"""Options of decoding strategies change what they say."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lmi_core.config.table.option import Outcome
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


@pytest.mark.parametrize(
    ("device", "ops", "outcome"),
    [
        ("cpu", "native", Outcome.HONOURED),
        ("torch-cpu", "", Outcome.HONOURED),
        ("torch-cpu", "native", Outcome.REFUSED),
        ("torch-cpu", "torch, native", Outcome.REFUSED),
        ("torch-cpu", "attention:native,sample:native,launch:native", Outcome.REFUSED),
        ("torch-cpu", "native,launch:torch", Outcome.HONOURED),
        ("torch-cpu", "linear:native", Outcome.HONOURED),
    ],
)
def test_steps_that_give_no_states_refuse_contrastive_search(
    model_dir: Any, explained: Any, device: str, ops: str, outcome: Outcome
) -> None:
    written = f"option.decoding_strategy=contrastive\noption.device={device}\n"
    report = explained(model_dir(written), "--prefer-native", environ={"LMI_OPS": ops})
    row = next(row for row in report.rows[0] if row.key == "option.decoding_strategy")
    assert row.outcome is outcome
    assert ("hidden states" in row.text) is (outcome is Outcome.REFUSED)


def test_ops_that_nothing_has_are_said(model_dir: Any, explained: Any) -> None:
    written = model_dir("option.device=torch-cpu\n")
    report = explained(written, "--prefer-native", environ={"LMI_OPS": "attention:magic"})
    assert ["LMI_OPS has 'attention:magic'" in str(error) for error in report.errors] == [True]
    assert not explained(model_dir("option.device=cpu\n"), environ={"LMI_OPS": "magic"}).errors
