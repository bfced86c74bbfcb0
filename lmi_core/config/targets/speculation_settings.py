"""Speculation as users of every system write it, for our engine."""

from __future__ import annotations

import json
from typing import Any

from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.errors import UserError
from lmi_core.settings.speculation_config import MAX_DRAFT_TOKENS, SpeculationConfig

_CONFIG = "option.speculative_config"
_SPECULATE = "option.speculate"
_SPECULATION = "option.speculation"
_FIELDS = {
    "num_speculative_tokens": "max_draft_tokens",
    "prompt_lookup_min": "min_match",
    "prompt_lookup_max": "max_match",
}
_NGRAM_MODELS = ("ngram", "[ngram]")
"""vLLM's older way of naming the method."""


def speculation_settings(values: Values, problems: Problems) -> SpeculationConfig | None:
    """What the engine is told; None where nothing is drafted. Faults go to ``problems``, and
    methods that there aren't among the values that are ignored, with keys that another one beats.
    """
    text = values.get(_CONFIG)
    if isinstance(text, str):
        try:
            document = json.loads(text)
            config = _from_library(document)
        except UserError as error:
            problems.error(values.where(_CONFIG), f"{_CONFIG}: {error}", _CONFIG)
            return None
        if isinstance(config, SpeculationConfig):
            _warn_of_unknown(document, values.where(_CONFIG), problems)
            _beat(values, _CONFIG, _SPECULATE, _SPECULATION)
            return config
        values.ignored[_CONFIG] = config
    num_tokens = values.get(_SPECULATE)
    if isinstance(num_tokens, int):
        _beat(values, _SPECULATE, _SPECULATION)
        if not num_tokens:
            return None
        return SpeculationConfig(max_draft_tokens=min(num_tokens, MAX_DRAFT_TOKENS))
    return SpeculationConfig() if values.get(_SPECULATION) == "ngram" else None


def _warn_of_unknown(document: dict[str, Any], where: str, problems: Problems) -> None:
    known = ("method", "model", *_FIELDS)
    unknown = ", ".join(name[:80] for name in document if name not in known)
    if unknown:
        message = f"{_CONFIG}: nothing here uses {unknown}; used are {', '.join(known)}"
        problems.warn(where, message, _CONFIG)


def _beat(values: Values, winner: str, *losers: str) -> None:
    values.ignored |= {key: f"{winner} is used instead" for key in losers if key in values.known}


def _from_library(document: Any) -> SpeculationConfig | str:
    """vLLM's ``speculative_config``, or why it has no effect. Raises UserError."""
    if not isinstance(document, dict):
        raise UserError(f"is {document!r:.80}; write an object with a method")
    method, model = document.get("method"), document.get("model")
    if method is None and model in _NGRAM_MODELS:
        method = "ngram"
    if method != "ngram":
        named = f"method {method!r:.40}" if method is not None else "a draft model"
        return f"not available in this version: {named}; tokens are the same without"
    settings = {
        ours: document[theirs]
        for theirs, ours in _FIELDS.items()
        if document.get(theirs) is not None
    }
    if "min_match" not in settings and isinstance(settings.get("max_match"), int):
        settings["min_match"] = min(2, settings["max_match"])
    if "max_match" not in settings and isinstance(settings.get("min_match"), int):
        settings["max_match"] = max(32, settings["min_match"])
    try:
        return SpeculationConfig(**settings)
    except UserError as error:
        message = str(error)
        for theirs, ours in _FIELDS.items():
            message = message.replace(ours, theirs)
        raise UserError(message) from None
