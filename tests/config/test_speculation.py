"""Speculation as TGI, vLLM and our own key have it, and what becomes of what there isn't."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lmi_core.config.explain import Page
from lmi_core.settings.speculation_config import SpeculationConfig
from tests.checkpoints import cached_checkpoint
from tests.config.cases import LLAMA
from tests.config.test_honoured import generate, run, running
from tests.engine.eagle_heads import write_head
from tests.engine.test_medusa_heads import write_heads


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ("", None),
        ("option.speculation=ngram", SpeculationConfig()),
        ("option.speculation=off", None),
        ("option.speculate=3", SpeculationConfig(max_draft_tokens=3)),
        ("option.speculate=900", SpeculationConfig(max_draft_tokens=64)),
        ("option.speculate=0\noption.speculation=ngram", None),
        (
            'option.speculative_config={"method": "ngram", "num_speculative_tokens": 5,'
            ' "prompt_lookup_min": 3, "prompt_lookup_max": 4}',
            SpeculationConfig(max_draft_tokens=5, min_match=3, max_match=4),
        ),
        (
            'option.speculative_config={"model": "[ngram]", "num_speculative_tokens": 5,'
            ' "prompt_lookup_max": 1}',
            SpeculationConfig(max_draft_tokens=5, min_match=1, max_match=1),
        ),
        (
            'option.speculative_config={"method": "ngram", "prompt_lookup_min": 40}',
            SpeculationConfig(min_match=40, max_match=40),
        ),
    ],
)
def test_how_many_tokens_are_drafted(model_dir, resolved, properties, expected):
    model = resolved(model_dir(properties, config=LLAMA)).models[0]
    assert model.engine_config(Path("m")).speculation == expected
    shown = json.loads(json.dumps(model.engine.shown()))
    if expected is not None:
        expected = {k: v for k, v in asdict(expected).items() if k != "draft_model"}
    assert shown.get("speculation") == expected


@pytest.mark.parametrize(
    ("properties", "num_tokens"),
    [
        ("option.speculative_draft_model=DRAFT", 5),
        ("option.speculative_model=DRAFT\noption.num_speculative_tokens=7", 7),
        ("option.draft_model_id=DRAFT\noption.spec_length=2\noption.speculation=off", 2),
        ("option.speculative_draft_model=DRAFT\noption.speculate=3", 3),
        ('option.speculative_config={"model": "DRAFT", "num_speculative_tokens": 4}', 4),
        ('option.speculative_config={"model": "DRAFT", "method": "draft_model"}', 5),
        ('option.speculative_config={"model": "DRAFT", "method": "medusa"}', 5),
        ('option.speculative_config={"model": "DRAFT", "method": "eagle3"}', 5),
    ],
)
def test_how_many_tokens_a_model_drafts(model_dir, resolved, properties, num_tokens):
    draft = Path(model_dir(name="model/small", config=LLAMA))
    model = resolved(model_dir(properties.replace("DRAFT", "small"), config=LLAMA)).models[0]
    speculation = model.engine_config(Path("m")).speculation
    assert speculation == SpeculationConfig(max_draft_tokens=num_tokens, draft_model=draft)
    assert model.engine_config(Path("m"), draft=Path("d")).speculation.draft_model == Path("d")


@pytest.mark.parametrize(
    "key", ["option.speculative_draft_model", "option.draft_model_id", "option.speculative_config"]
)
def test_a_draft_model_drafts(configured, key):
    draft = cached_checkpoint("llama2", dtype="bfloat16")
    text = json.dumps({"model": str(draft)}) if "config" in key else draft
    config = configured("option.enable_prefix_caching=false\n", environ=environment(key, text))

    async def main():
        async with running(config) as engine:
            await generate(engine, num_tokens=40)
            totals = engine.stats().totals
            assert engine.info.runner.draft_model == str(draft)
            assert totals.num_model_accepted_tokens == totals.num_model_draft_tokens > 0
            assert totals.num_steps < 40

    run(main())


def test_medusa_heads_draft(configured, tmp_path):
    heads = write_heads(tmp_path / "heads")
    config = configured(environ=environment("option.speculative_draft_model", heads))

    async def main():
        async with running(config) as engine:
            await generate(engine, num_tokens=40)
            assert engine.info.runner.draft_model == f"3 Medusa heads of {heads}"
            assert engine.stats().totals.num_model_draft_tokens > 0

    run(main())


@pytest.mark.parametrize("key", ["option.speculative_draft_model", "option.speculative_config"])
def test_an_eagle_head_drafts(configured, tmp_path, key):
    head = write_head(tmp_path / "head")
    text = json.dumps({"method": "eagle3", "model": str(head)}) if "config" in key else head
    config = configured(environ=environment(key, text))

    async def main():
        async with running(config) as engine:
            await generate(engine, num_tokens=40)
            assert engine.info.runner.draft_model == f"an EAGLE-3 head of {head}"
            assert engine.stats().totals.num_model_draft_tokens > 0

    run(main())


def environment(key, text):
    return {f"OPTION_{key.removeprefix('option.').upper()}": str(text)}


def test_what_drafts_is_explained(model_dir, explained):
    model_dir(name="model/small", config=LLAMA)
    properties = "option.speculative_draft_model=small\noption.draft_model_tp_size=2"
    report = explained(model_dir(properties, config=LLAMA))
    rows = {row.key: row for row in report.rows[0]}
    assert rows["option.speculative_draft_model"].outcome == "honoured"
    assert rows["option.draft_model_tp_size"].outcome == "no effect"
    assert not report.errors
    assert "  drafts   by model/small (local)" in Page().of(report)


@pytest.mark.parametrize("key", ["speculative_length", "spec_length", "max_draft_len"])
def test_a_number_of_drafts_alone_has_no_effect(model_dir, explained, key):
    report = explained(model_dir(f"option.{key}=3", config=LLAMA))
    row = next(row for row in report.rows[0] if row.key == f"option.{key}")
    assert row.outcome == "no effect"
    assert "no draft model is named" in row.text


def test_a_model_names_no_draft_model_of_the_host(model_dir, explained, tmp_path):
    for line in (
        f"option.speculative_draft_model={tmp_path}",
        f'option.speculative_config={{"model": "{tmp_path}"}}',
    ):
        report = explained(model_dir(line, config=LLAMA))
        assert "is outside the model's directory" in str(report.errors[0])


def test_a_draft_model_that_is_nowhere_is_one_error(model_dir, explained):
    report = explained(model_dir("option.speculative_draft_model=/a b", config=LLAMA))
    (error,) = report.errors
    assert "outside the model's directory" in str(error)
    report = explained(
        model_dir(name="other", config=LLAMA),
        environ={"OPTION_SPECULATIVE_DRAFT_MODEL": "no/such/place"},
    )
    (error,) = report.errors
    assert "draft model 'no/such/place' is neither a directory" in str(error)


@pytest.mark.parametrize(
    ("document", "named"),
    [('{"method": "mtp", "model": "m"}', "method 'mtp'"), ('{"model": 3}', "model 3")],
)
def test_other_methods_change_nothing(model_dir, explained, document, named):
    report = explained(model_dir(f"option.speculative_config={document}", config=LLAMA))
    row = next(row for row in report.rows[0] if row.key == "option.speculative_config")
    assert row.outcome == "no effect"
    assert named in row.text
    assert not report.errors


def test_what_nothing_uses_is_said(model_dir, explained):
    document = '{"method": "ngram", "prompt_lookup_mim": 3, "revision": "main"}'
    report = explained(model_dir(f"option.speculative_config={document}", config=LLAMA))
    (warning,) = [str(problem) for problem in report.warnings if "speculative" in str(problem)]
    assert "nothing here uses prompt_lookup_mim, revision; used are method, model" in warning
    document = '{"method": "ngram", "prompt_lookup_min": 3}'
    report = explained(model_dir(f"option.speculative_config={document}", config=LLAMA))
    assert not [problem for problem in report.warnings if "speculative" in str(problem)]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[3]", "write an object with a method"),
        ('{"methd": "ngram"}', "names neither a method nor a model: write one"),
        ('{"method": "medusa"}', "with method medusa write its place"),
        ('{"method": "eagle3"}', "with method eagle3 write its place"),
        (
            '{"method": "ngram", "num_speculative_tokens": 65}',
            "num_speculative_tokens is 65; allowed are 1 to 64",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": "5"}',
            "num_speculative_tokens is '5'; allowed are int",
        ),
        (
            '{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}',
            "prompt_lookup_max is 4; allowed are 5 to 1024",
        ),
    ],
)
def test_what_is_wrong_is_named(model_dir, explained, document, message):
    report = explained(model_dir(f"option.speculative_config={document}", config=LLAMA))
    (error,) = report.errors
    assert "option.speculative_config" in str(error)
    assert message in str(error)


def test_explaining_says_what_is_drafted(model_dir, explained):
    report = explained(model_dir("option.speculate=3", config=LLAMA))
    row = next(row for row in report.rows[0] if row.key == "option.speculate")
    assert row.outcome == "honoured"
    assert "max_draft_tokens=3" in row.text


@pytest.mark.parametrize(
    ("properties", "beaten", "winner"),
    [
        ("option.speculate=0\noption.speculation=ngram", "speculation", "speculate"),
        (
            'option.speculation=off\noption.speculative_config={"method": "ngram"}',
            "speculation",
            "speculative_config",
        ),
        (
            'option.speculate=3\noption.speculative_config={"method": "ngram"}',
            "speculate",
            "speculative_config",
        ),
    ],
)
def test_explaining_says_which_of_several_keys_counts(
    model_dir, explained, properties, beaten, winner
):
    report = explained(model_dir(properties, config=LLAMA))
    rows = {row.key.removeprefix("option."): row for row in report.rows[0]}
    assert rows[beaten].outcome == "no effect"
    assert f"option.{winner} is used" in rows[beaten].text
    assert rows[winner].outcome != "no effect"


@pytest.mark.parametrize(
    "properties",
    ["option.speculate=3", 'option.speculative_config={"method": "ngram"}'],
)
def test_models_that_draft_nothing_are_served_without(model_dir, explained, properties):
    t5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}
    report = explained(model_dir(properties, config=t5))
    row = next(row for row in report.rows[0] if row.key == properties.partition("=")[0])
    assert row.outcome == "no effect"
    assert not any("specul" in str(error) for error in report.errors)
