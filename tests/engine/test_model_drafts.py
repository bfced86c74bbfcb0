"""A draft model decides how many steps a text takes, and nothing else."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.stats import EngineTotals
from lmi_core.errors import ModelError
from lmi_core.runners import draft_steps
from lmi_core.runners.cpu.cpu_model import find_cpu_model
from lmi_core.runners.cpu.draft_runner import CpuDraftRunner
from lmi_core.runners.cpu.memory_needs import estimate
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.speculation_config import SpeculationConfig
from tests.checkpoints import cached_checkpoint, make_checkpoint
from tests.engine.draft_models import drafted_by, first_layers, near_copy
from tests.engine.random_drafts import SPECULATION, draft_whatever_it_costs
from tests.engine.test_invariance import CONDITIONS, assert_same, outcomes_alone, stored_model
from tests.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

TARGET = ("llama3", "bfloat16")
PARAMS = SamplingParams(max_new_tokens=48, ignore_eos=True, seed=5)
PROMPTS = [tuple(range(10 + i, 60 + 7 * i)) for i in range(4)]


def copy_of_target() -> Path:
    return cached_checkpoint(TARGET[0], dtype=TARGET[1])


def config_of(draft: Path | None, **changes: Any) -> EngineConfig:
    settings = {"max_model_len": 256, "num_threads": 1, "kv_cache_bytes": 32 << 20, **changes}
    speculation = None if draft is None else drafted_by(draft)
    return EngineConfig(model=copy_of_target(), speculation=speculation, **settings)


async def generated(
    config: EngineConfig, params: SamplingParams, prompts: list[tuple[int, ...]]
) -> tuple[list[list[tuple[int, float | None]]], EngineTotals]:
    async def one(engine: Engine, prompt: tuple[int, ...]) -> list[tuple[int, float | None]]:
        events = [event async for event in engine.generate(prompt, params)]
        events.sort(key=lambda event: event.choice)
        return [(event.token_id, event.logprob) for event in events]

    async with Engine(config, check_integrity=True) as engine:
        texts = await asyncio.gather(*(one(engine, prompt) for prompt in prompts))
        return list(texts), engine.stats().totals


def both(
    draft: Path, params: SamplingParams = PARAMS, num_prompts: int = 1, **changes: Any
) -> EngineTotals:
    """Compare the texts with and without; returns the drafting engine's totals."""
    prompts = PROMPTS[:num_prompts]
    expected, _ = asyncio.run(generated(config_of(None, **changes), params, prompts))
    texts, totals = asyncio.run(generated(config_of(draft, **changes), params, prompts))
    assert texts == expected
    assert totals.num_model_draft_tokens == totals.num_draft_tokens > 0
    return totals


def share(totals: EngineTotals) -> float:
    return totals.num_model_accepted_tokens / totals.num_model_draft_tokens


@pytest.fixture(autouse=True)
def _drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_whatever_it_costs(monkeypatch)


@pytest.mark.parametrize(
    "params",
    [
        replace(PARAMS, temperature=0.0),
        replace(PARAMS, temperature=1.0),
        replace(PARAMS, temperature=1.6, top_p=0.9, logprobs=2),
        replace(PARAMS, temperature=0.8, top_k=20, watermark_delta=2.0),
        replace(PARAMS, temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5),
    ],
    ids=["greedy", "sampled", "filtered", "watermarked", "penalised"],
)
def test_the_model_itself_is_always_right(params: SamplingParams) -> None:
    totals = both(copy_of_target(), params)
    assert share(totals) == 1.0
    assert totals.num_steps <= 1 + -(-47 // 5) + 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_like_it_is_right_sometimes(temperature: float) -> None:
    totals = both(near_copy(*TARGET), replace(PARAMS, temperature=temperature), 4)
    assert 0.1 < share(totals) < 0.97
    totals = both(first_layers(*TARGET, 2), replace(PARAMS, temperature=temperature), 4)
    assert share(totals) < 0.5


def test_another_model_of_its_vocabulary_is_right_by_chance() -> None:
    totals = both(cached_checkpoint("qwen3", dtype="bfloat16", seed=3), PARAMS, 4)
    assert share(totals) < 0.1


def test_a_text_is_caught_up_with_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_steps, "MAX_DRAFT_ROWS", 16)
    totals = both(copy_of_target(), PARAMS, 4, max_num_seqs=4)
    assert share(totals) == 1.0


def test_what_is_shared_is_computed_once() -> None:
    """By choices of a request, and by requests with the same prefix."""
    prompt = tuple(range(4, 230))

    async def main() -> None:
        async with Engine(config_of(copy_of_target(), block_size=16)) as engine:
            rows: list[int] = []
            submit = CpuDraftRunner.submit
            drafter = engine._core._runner.drafter  # type: ignore[union-attr]

            def note(steps: Any) -> None:
                rows.extend(step.num_tokens for step in steps)
                submit(drafter, steps)

            drafter.submit = note
            params = replace(PARAMS, max_new_tokens=12, n=3, temperature=1.0)
            async for _ in engine.generate(prompt, params):
                pass
            assert len(prompt) - 1 <= sum(count for count in rows if count > 16)
            assert sum(count for count in rows if count > 16) <= len(prompt) + 2 * 16
            rows.clear()
            async for _ in engine.generate(prompt, params):
                pass
            assert max(rows) <= 16
            totals = engine.stats().totals
            assert share(totals) == 1.0

    asyncio.run(main())


def test_a_draft_model_of_fewer_positions_stops_there(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(copy_of_target(), draft)
    path = draft / "config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"max_position_embeddings": 80}))
    totals = both(draft, replace(PARAMS, temperature=0.0))
    assert totals.num_accepted_tokens <= 80 - len(PROMPTS[0])
    assert totals.num_accepted_tokens > 10


def test_choices_without_a_prefix_cache_share_blocks_that_have_no_names() -> None:
    totals = both(copy_of_target(), replace(PARAMS, n=3), 2, enable_prefix_caching=False)
    assert share(totals) == 1.0


def test_a_smaller_embedding_is_padding_that_is_left_out(tmp_path: Path) -> None:
    draft = make_checkpoint(tmp_path / "draft", "llama2", tokenizer=False, vocab_size=360)
    write_tokenizer(draft, 360)
    both(draft, PARAMS, 2)
    larger = make_checkpoint(tmp_path / "larger", "llama2", vocab_size=VOCAB_SIZE + 64)
    both(larger, PARAMS, 2)


def test_a_draft_model_that_fails_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    submitted: list[int] = []

    def fail(self: CpuDraftRunner, steps: Any) -> None:
        submitted.append(len(steps))
        for step in steps:
            step.error = "out of luck"

    monkeypatch.setattr(CpuDraftRunner, "submit", fail)
    totals = both(copy_of_target(), PARAMS)
    assert len(submitted) <= 2
    assert totals.num_failed_steps == 0
    assert caplog.text.count("the draft model failed") == 1
    assert "out of luck" in caplog.text


CASES = [("llama3", "bf16", None, "auto"), ("qwen3", "bf16", "int4", "auto")]
CASES += [("mistral", "fp32", None, "int8")]


@pytest.mark.parametrize(("variant", "dtype", "quantize", "kv_dtype"), CASES)
def test_bits_do_not_depend_on_a_draft_model(
    variant: str, dtype: str, quantize: str | None, kv_dtype: str
) -> None:
    """Its tokens are right and wrong, whatever else happens."""
    case = (variant, dtype, quantize, kv_dtype)
    outcomes_alone(*case)
    draft = near_copy(variant, {"fp32": "float32", "bf16": "bfloat16"}[dtype])
    speculation = replace(SPECULATION, draft_model=draft)
    num_drafted = num_accepted = 0
    names = ("two threads", "chunks of 7", "plain loop", "few blocks")
    for name in names if case == CASES[0] else names[1::2]:
        changes = {**CONDITIONS[name], "speculation": speculation}
        totals = assert_same(case, name, len(name), **changes).stats().totals
        num_drafted += totals.num_model_draft_tokens
        num_accepted += totals.num_model_accepted_tokens
        assert totals.num_preemptions > 0 or name != "few blocks"
    assert 0.01 * num_drafted < num_accepted < num_drafted


def find(draft: Path, **changes: Any) -> Any:
    speculation = SpeculationConfig(draft_model=draft)
    config = EngineConfig(model=stored_model("llama3", "bf16"), speculation=speculation, **changes)
    return find_cpu_model(config), config


def test_what_cannot_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the draft model: .*absent"):
        find(tmp_path / "absent")
    other = make_checkpoint(tmp_path / "other", "llama2", tokenizer=False)
    path = other / "tokenizer.json"
    text = (copy_of_target() / "tokenizer.json").read_text()
    tokens = json.loads(text)
    vocabulary = tokens["model"]["vocab"]
    first, second = [token for token, i in vocabulary.items() if i in (40, 41)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokens))
    (other / "tokenizer_config.json").write_text("{}")
    with pytest.raises(
        ModelError, match=r"another vocabulary .* 2 ids .* the first is 40"
    ) as error:
        find(other)
    assert error.value.field == "draft_model"


def test_memory_counts_both_models() -> None:
    draft = first_layers(*TARGET, 2)
    found, config = find(draft, kv_cache_bytes=None, max_num_seqs=4)
    plain = find_cpu_model(replace(config, speculation=None))
    without = estimate(plain)
    needs = estimate(found)
    assert needs.kv_cache * 3 == without.kv_cache * 5  # blocks of three layers and two
    assert 1.4 * without.weights < needs.weights < 2 * without.weights
    assert needs.workspace > without.workspace
