"""A draft model on torch devices decides how many steps a text takes, and nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmi_core.engine import loop
from lmi_core.engine.engine import Engine
from lmi_core.engine.model_drafts import DraftChain, ModelDrafts
from lmi_core.engine.outputs import TokenEvent
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import EngineTotals
from lmi_core.ops.device.sampling_inputs import SamplingInputs
from lmi_core.runners.device.draft_runner import TorchDraftRunner
from lmi_core.runners.device.torch_runner import TorchRunner
from lmi_core.settings.speculation_config import SpeculationConfig
from lmi_core.structured.grammar import Grammar
from tests.checkpoints import cached_checkpoint
from tests.engine.draft_models import drafted_by, near_copy
from tests.engine.eagle_heads import write_head
from tests.engine.harness import assert_nothing_leaked, collect, run
from tests.engine.random_drafts import draft_whatever_it_costs
from tests.engine.test_medusa_heads import write_heads
from tests.runners.device.torch_harness import DEVICES, config_of, outcomes, skip_without

TARGET = ("llama3", "float32")
PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True, seed=5, logprobs=0)
PROMPT = tuple(range(10, 60))
GRAMMAR = Grammar.regex("[a-f]{2}(xyz[0-9]{3} )*")


@pytest.fixture(autouse=True)
def _drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_whatever_it_costs(monkeypatch)


def model() -> Path:
    return cached_checkpoint(TARGET[0], dtype=TARGET[1])


async def generated(
    device: str, draft: Path | None, params: SamplingParams, **changes: Any
) -> tuple[list[tuple[int, float | None]], EngineTotals]:
    if draft is not None:
        changes["speculation"] = drafted_by(draft)
    config = config_of(model(), device, **changes)
    async with Engine(config, check_integrity=True) as engine:
        events = await collect(engine, PROMPT, params)
        await assert_nothing_leaked(engine)
        totals = engine.stats().totals
    return [(event.token_id, event.logprob) for event in events], totals


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
        {"temperature": 0.9, "grammar": GRAMMAR, "ignore_eos": False},
    ],
    ids=["greedy", "sampled", "penalised", "grammar"],
)
def test_the_model_itself_is_always_right(device: str, changes: dict[str, Any]) -> None:
    skip_without(device)
    params = replace(PARAMS, **changes)
    expected, _ = run(generated(device, None, params, deterministic=True))
    texts, totals = run(generated(device, model(), params, deterministic=True))
    assert texts == expected
    most, num_right = totals.num_model_draft_tokens, totals.num_model_accepted_tokens
    is_cut = params.grammar is not None  # the last drafts are behind its end
    assert num_right == most > 0 or (is_cut and 0 < most - num_right < 4)
    assert totals.num_steps <= 1 + -(-len(texts) // 5) + 1


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_grammar_forces_is_drafted(device: str) -> None:
    skip_without(device)
    params = replace(PARAMS, temperature=0.9, grammar=GRAMMAR, ignore_eos=False)
    expected, _ = run(generated(device, None, params, deterministic=True))
    speculation = SpeculationConfig()
    texts, totals = run(
        generated(device, None, params, deterministic=True, speculation=speculation)
    )
    assert texts == expected
    assert totals.num_grammar_accepted_tokens > 0
    assert totals.num_steps < len(texts)


@pytest.mark.parametrize("device", DEVICES)
def test_texts_are_the_same_beside_each_other(device: str) -> None:
    """With prefixes in common, penalties, choices and scores of prompts, in few blocks."""
    skip_without(device)
    draft = near_copy(*TARGET)
    config = config_of(model(), device, deterministic=True)
    expected = run(outcomes(config))
    got = run(outcomes(replace(config, speculation=drafted_by(draft))))
    for events, others in zip(got, expected, strict=True):
        assert [seen(event) for event in events] == [seen(event) for event in others]


def seen(event: TokenEvent) -> tuple[object, ...]:
    return event.token_id, event.text, event.logprob, event.top, event.finish_reason


def test_penalties_count_tokens_ahead_of_them_beside_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each token once, also in steps that take a chain's."""
    monkeypatch.setattr(loop, "MAX_AHEAD_S", 1e3)  # whatever else the machine does
    monkeypatch.setattr(loop, "LEAD_S", 1e3)
    monkeypatch.setattr(ModelDrafts, "takes", lambda model, sequence: not sequence.needs_observe)
    sampling_of, counting = TorchRunner._sampling_of, set()

    def note(runner: TorchRunner, job: Any) -> SamplingInputs:
        sampling = sampling_of(runner, job)
        if job.step.counted_rows:
            counting.add(job.step.num_logit_rows > len(job.step.counted_rows))
        return sampling

    monkeypatch.setattr(TorchRunner, "_sampling_of", note)
    penalised = replace(PARAMS, temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.5)

    async def texts(**changes: Any) -> list[list[tuple[object, ...]]]:
        async with Engine(config_of(model(), "torch-cpu", **changes)) as engine:
            wanted = [(PROMPT, replace(PARAMS, max_new_tokens=50)), (PROMPT[:9], penalised)]
            outcomes = await asyncio.gather(*(collect(engine, *each) for each in wanted))
            await assert_nothing_leaked(engine)
            return [[seen(event) for event in events] for events in outcomes]

    expected = run(texts(deterministic=True, overlap=False))
    assert not counting
    assert run(texts(deterministic=True, speculation=drafted_by(model()))) == expected
    assert counting == {False, True}, "steps without drafts, and with some"


def test_a_chain_that_fails_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = run(generated("torch-cpu", None, PARAMS, deterministic=True))

    def fail(self: TorchDraftRunner, *args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(TorchDraftRunner, "_run_one", fail)
    texts, totals = run(generated("torch-cpu", model(), PARAMS, deterministic=True))
    assert [token for token, _ in texts] == [token for token, _ in expected]
    assert totals.num_failed_steps == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa"])
def test_heads(device: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they draft is what the CPU's head does, and texts are the same without."""
    skip_without(device)
    write = write_heads if kind == "medusa" else partial(write_head, kind=kind)
    head = write(tmp_path / kind)
    expected, _ = run(generated(device, None, PARAMS, deterministic=True))
    drafted: list[dict[int, list[int]]] = []
    for on in (device, "cpu"):
        seen = drafts_noted(monkeypatch)
        texts, totals = run(generated(on, head, PARAMS, deterministic=on != "cpu"))
        assert [token for token, _ in texts] == [token for token, _ in expected]
        assert totals.num_model_draft_tokens > 0
        drafted.append(seen)
    first, second = drafted
    pairs = [(first[at], second[at]) for at in first.keys() & second.keys()]
    matches = [one == other for both in pairs for one, other in zip(*both, strict=False)]
    assert sum(matches) > 0.8 * len(matches) > 0  # the CPU's matrices are rounded otherwise


def drafts_noted(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Of the one sequence, by how long it was; one that drafts less often is at other lengths."""
    seen: dict[int, list[int]] = {}
    read = DraftChain.read

    def note(chain: DraftChain, step: Any) -> None:
        read(chain, step)
        seen.update((len(each.token_ids), list(each.drafts)) for each in chain.rows)

    monkeypatch.setattr(DraftChain, "read", note)
    return seen
