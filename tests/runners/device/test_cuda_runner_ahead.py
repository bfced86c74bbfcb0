"""Steps that C++ launches before the last one's tokens are known, and drafts beside them, give the
bits of those that wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.structured.grammar import Grammar
from tests.engine.harness import run
from tests.engine.random_drafts import SPECULATION, draft_at_random
from tests.tiny_tokenizer import VOCAB_SIZE

torch = pytest.importorskip("torch", exc_type=ImportError)

from tests.runners.device.cuda_harness import (  # noqa: E402
    CPP,
    PYTHON,
    TOTALS,
    assert_alike,
    assert_same,
    configured,
    device,
    outcomes,
    prompts,
    rows_ahead,
)

__all__ = ["device", "rows_ahead"]  # fixtures
pytestmark = pytest.mark.usefixtures("device")


def test_steps_run_ahead_of_their_tokens(
    rows_ahead: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens go from step to step on the device, also to other rows when some have ended."""
    common = SamplingParams(ignore_eos=True, temperature=0.7, seed=5, logprobs=1)
    wanted = [
        (prompt, replace(common, max_new_tokens=count))
        for prompt, count in zip(prompts(2, 2, 2), (3, 7, 9), strict=True)
    ]
    ahead = assert_same(configured(), wanted, monkeypatch)
    assert [0, 1, 2] in rows_ahead
    assert [1, 2] in rows_ahead
    num_ahead = len(rows_ahead)
    assert_alike(ahead, run(outcomes(configured(overlap=False), wanted), 110))
    assert len(rows_ahead) == num_ahead


@pytest.mark.parametrize(
    "changes",
    [
        {"frequency_penalty": 0.7, "repetition_penalty": 1.3},
        {"min_new_tokens": 6, "stop_token_ids": tuple(range(0, VOCAB_SIZE, 2))},
        {"watermark_delta": 3.0},
        {"grammar": Grammar.regex("[a-f]{3}(-[0-9]{2}){2}"), "ignore_eos": False},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_follows_tokens_runs_ahead_too(
    changes: dict[str, Any], rows_ahead: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMI_OPS", CPP)
    settings = {"temperature": 0.7, "seed": 5, "logprobs": 1, "max_new_tokens": 9}
    params = SamplingParams(**{"ignore_eos": True, **settings, **changes})
    wanted = [(prompt, params) for prompt in prompts(2, 3)]
    plain = run(outcomes(configured(overlap=False), wanted), 110)
    assert not rows_ahead
    assert_alike(run(outcomes(configured(), wanted), 110), plain)
    assert rows_ahead.count([0, 1]) > 2


def test_drafts(rows_ahead: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties count drafts; beside a sequence that runs ahead, tokens are known for some rows."""
    common = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=0.7, logprobs=1)
    wanted = [
        (prompt, replace(common, seed=seed, frequency_penalty=0.5 * (seed == 5)))
        for seed, prompt in enumerate(prompts(3, 2, 2), start=4)
    ]
    monkeypatch.setenv("LMI_OPS", CPP)
    plain = run(outcomes(configured(overlap=False), wanted), 110)
    truths = {
        (tuple(prompt), params.seed, 0): [event.token_id for event in events]
        for (prompt, params), events in zip(wanted, plain, strict=True)
    }
    drafted = []
    for kernels in (PYTHON, CPP):
        monkeypatch.setenv("LMI_OPS", kernels)
        draft_at_random(monkeypatch, truths, VOCAB_SIZE)
        config = configured(overlap=False, speculation=SPECULATION)
        drafted.append(run(outcomes(config, wanted), 110))
        assert TOTALS[-1].num_accepted_tokens > 0
    assert_alike(*drafted)

    draft_at_random(monkeypatch, truths, VOCAB_SIZE)
    ahead = run(outcomes(configured(speculation=SPECULATION), wanted[::2]), 110)
    assert any(-1 in rows and max(rows) >= 0 for rows in rows_ahead)
    # Kernels that aren't bound to invariance round by a step's rows, which may decide a token.
    for events, *others in zip(ahead, plain[::2], drafted[1][::2], strict=True):
        tokens = [event.token_id for event in events]
        assert tokens in [[event.token_id for event in other] for other in others]
