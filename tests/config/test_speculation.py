"""Speculation as TGI, vLLM and our own key have it, and what becomes of what there isn't."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lmi_core.settings.speculation_config import SpeculationConfig
from tests.config.cases import LLAMA


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
    assert shown.get("speculation") == (None if expected is None else asdict(expected))


@pytest.mark.parametrize(
    ("document", "named"),
    [('{"method": "eagle3", "model": "m"}', "method 'eagle3'"), ('{"model": "m"}', "draft model")],
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
