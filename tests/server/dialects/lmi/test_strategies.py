"""LMI's decoding strategies: what a request or the configuration says, and what contradicts."""

from __future__ import annotations

from typing import Any

import pytest

from lmi_core.errors import UserError
from lmi_server.dialects.unknown_fields import IGNORED_HEADER
from tests.server.dialects.lmi.test_lmi_formats import parameters, parse


@pytest.mark.parametrize(
    ("asked", "default", "expected", "ignored"),
    [
        ({}, "", (0.0, 0, 1.0), None),
        ({"top_p": 0.5}, "", (1.0, 0, 0.5), None),
        ({}, "greedy", (0.0, 0, 1.0), None),
        ({"temperature": 0.5}, "greedy", (0.0, 0, 1.0), None),
        ({"do_sample": True}, "greedy", (1.0, 4, 1.0), None),
        ({}, "sample", (1.0, 4, 1.0), None),
        ({"do_sample": False}, "sample", (0.0, 0, 1.0), None),
        ({"top_p": 0.5}, "sample", (1.0, 4, 1.0), "top_p"),
        ({"top_p": 0.5, "top_k": 0}, "sample", (1.0, 0, 0.5), None),
        ({"decoding_strategy": "greedy"}, "sample", (0.0, 0, 1.0), None),
        ({"decoding_strategy": "greedy", "do_sample": True}, "", (1.0, 4, 1.0), None),
        ({"decoding_strategy": "sample", "top_k": 9}, "", (1.0, 9, 1.0), None),
    ],
)
def test_decoding_strategies(
    asked: dict[str, Any], default: str, expected: tuple[float, int, float], ignored: str | None
) -> None:
    """By the request, else by the configuration; do_sample beats both, and top-4 is its own."""
    parsed = parse(parameters(**asked), strategy=default)
    params = parsed.requests[0].params
    assert (params.temperature, params.top_k, params.top_p) == expected
    assert parsed.renderer.headers.get(IGNORED_HEADER) == ignored


CONTRASTIVE = "option.decoding_strategy=contrastive"


@pytest.mark.parametrize(
    ("asked", "setting", "expected", "ignored"),
    [
        ({}, CONTRASTIVE, (0.6, 4), None),
        ({"temperature": 0.7, "top_p": 0.9}, CONTRASTIVE, (0.6, 4), "temperature, top_p"),
        ({"penalty_alpha": 0.3, "top_k": 6}, CONTRASTIVE, (0.3, 6), None),
        ({"decoding_strategy": "contrastive"}, None, (0.6, 4), None),
        ({"decoding_strategy": "contrastive", "penalty_alpha": 0}, None, (0.0, 4), None),
        ({"decoding_strategy": "contrastive"}, "option.decoding_strategy=sample", (0.6, 4), None),
        ({"penalty_alpha": 0.4, "top_k": 8}, None, (0.4, 8), None),
        ({"penalty_alpha": 0.4}, "option.decoding_strategy=sample", (0.4, 4), None),
        ({"penalty_alpha": 0}, None, (None, 0), None),
        ({"do_sample": True}, CONTRASTIVE, (None, 4), None),
        ({"do_sample": True}, None, (None, 0), None),
        ({"num_beams": 3}, CONTRASTIVE, (None, 0), None),
        ({"decoding_strategy": "greedy"}, CONTRASTIVE, (None, 0), None),
    ],
)
def test_contrastive_search(
    asked: dict[str, Any],
    setting: str | None,
    expected: tuple[float | None, int],
    ignored: str | None,
) -> None:
    """With LMI's defaults, where a request doesn't say it; what samples or has beams, does so."""
    parsed = parse(parameters(**asked), settings=(setting,) if setting else ())
    params = parsed.requests[0].params
    assert (params.penalty_alpha, params.top_k) == expected
    assert params.temperature == (1.0 if asked.get("do_sample") else 0.0)
    assert parsed.renderer.headers.get(IGNORED_HEADER) == ignored


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"decoding_strategy": "contrastive", "do_sample": True},
            "parameters.decoding_strategy asks for contrastive search, but do_sample is true",
        ),
        (
            {"decoding_strategy": "contrastive", "use_beam_search": True, "best_of": 3},
            "parameters.decoding_strategy asks for contrastive search, but num_beams is 3",
        ),
        (
            {"penalty_alpha": 0.5, "num_beams": 2},
            "parameters.penalty_alpha asks for contrastive search, but num_beams is 2",
        ),
        (
            {"penalty_alpha": 0.5, "do_sample": True},
            "parameters.penalty_alpha asks for contrastive search, but do_sample is true",
        ),
        (
            {"penalty_alpha": 0.5, "decoding_strategy": "greedy"},
            "penalty_alpha asks for contrastive search, but decoding_strategy is greedy",
        ),
        ({"penalty_alpha": "much"}, "parameters.penalty_alpha must be float | null, got str"),
    ],
)
def test_contradictory_strategies(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as raised:
        parse(parameters(**asked), settings=(CONTRASTIVE,))
    assert words in str(raised.value)
