"""Speculation as users of every system write it, for our engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lmi_core.config.artefacts.model_source import ModelSource, locate
from lmi_core.config.problem import Problems
from lmi_core.config.sources.merge import Values
from lmi_core.errors import UserError
from lmi_core.settings.speculation_config import MAX_DRAFT_TOKENS, SpeculationConfig

_CONFIG = "option.speculative_config"
_SPECULATE = "option.speculate"
_SPECULATION = "option.speculation"
_MODELS = ("option.speculative_draft_model", "option.draft_model_id")
_LENGTHS = ("option.speculative_length", "option.spec_length", "option.max_draft_len")
_LENGTH = 5
"""LMI's drafts of a step, where a draft model is named without their number."""
_FIELDS = {
    "num_speculative_tokens": "max_draft_tokens",
    "prompt_lookup_min": "min_match",
    "prompt_lookup_max": "max_match",
}
_NGRAM_MODELS = ("ngram", "[ngram]")
"""vLLM's older way of naming the method."""
_DRAFT_MODEL = "draft_model"
"""vLLM's newer name of the method that ``model`` alone means."""
_METHODS = (_DRAFT_MODEL, "medusa", "eagle", "eagle3")


@dataclass(frozen=True, slots=True)
class DraftSource:
    """Where a draft model's files are, and the key that says it."""

    key: str
    source: ModelSource


@dataclass(frozen=True, slots=True)
class SpeculationSettings:
    """What the engine is told, but for the place of a draft model, which may not be here yet."""

    config: SpeculationConfig
    draft: DraftSource | None = None

    def engine(self, draft: Path | None) -> SpeculationConfig:
        """The engine's part; ``draft``: where the draft model is by now, None: it isn't here."""
        return replace(self.config, draft_model=draft)


def speculation_settings(
    values: Values, directory: Path | None, problems: Problems
) -> SpeculationSettings | None:
    """What the engine is told; None where nothing is drafted. Faults go to ``problems``, and
    methods that there aren't among the values that are ignored, with keys that another one beats.
    ``directory``: of the model's own options, which relative paths may start from.
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
            return _settings_of(document, config, values, directory, problems)
        values.ignored[_CONFIG] = config
    named = _first(values, _MODELS)
    length = _first(values, _LENGTHS)
    if named is not None:
        _beat(values, named, _SPECULATION)
        num_tokens = values.get(length or _SPECULATE) or _LENGTH
        assert isinstance(num_tokens, int)
        config = SpeculationConfig(max_draft_tokens=min(num_tokens, MAX_DRAFT_TOKENS))
        return _with_draft(config, named, str(values.get(named)), values, directory, problems)
    if length is not None:
        values.ignored[length] = f"no draft model is named by {_MODELS[0]}"
    num_tokens = values.get(_SPECULATE)
    if isinstance(num_tokens, int):
        _beat(values, _SPECULATE, _SPECULATION)
        if not num_tokens:
            return None
        most = min(num_tokens, MAX_DRAFT_TOKENS)
        return SpeculationSettings(SpeculationConfig(max_draft_tokens=most))
    if values.get(_SPECULATION) != "ngram":
        return None
    return SpeculationSettings(SpeculationConfig())


def draft_place(document: object) -> str | None:
    """The draft model that vLLM's ``speculative_config`` names, or None."""
    if not isinstance(document, dict):
        return None
    method, model = document.get("method"), document.get("model")
    if method not in (None, *_METHODS) or not isinstance(model, str) or model in _NGRAM_MODELS:
        return None
    return model


def _settings_of(
    document: dict[str, Any],
    config: SpeculationConfig,
    values: Values,
    directory: Path | None,
    problems: Problems,
) -> SpeculationSettings | None:
    """Of vLLM's JSON, which beats every other key."""
    known = ("method", "model", *_FIELDS)
    unknown = ", ".join(name[:80] for name in document if name not in known)
    if unknown:
        message = f"{_CONFIG}: nothing here uses {unknown}; used are {', '.join(known)}"
        problems.warn(values.where(_CONFIG), message, _CONFIG)
    _beat(values, _CONFIG, _SPECULATE, _SPECULATION, *_MODELS, *_LENGTHS)
    place = draft_place(document)
    if place is None:
        return SpeculationSettings(config)
    return _with_draft(config, _CONFIG, place, values, directory, problems)


def _with_draft(
    config: SpeculationConfig,
    key: str,
    text: str,
    values: Values,
    directory: Path | None,
    problems: Problems,
) -> SpeculationSettings:
    if key in values.refused:
        return SpeculationSettings(config)
    is_own = values.known[key].setting.is_of_model
    source = locate(text, None, None if is_own else Path(), directory)
    if source is not None:
        return SpeculationSettings(config, DraftSource(key, source))
    problems.error(
        values.where(key),
        f"{key}: draft model {text[:200]!r} is neither a directory, a GGUF file, a hub id, nor an "
        "s3:// prefix",
        key,
    )
    return SpeculationSettings(config)


def _first(values: Values, keys: tuple[str, ...]) -> str | None:
    """The first of ``keys`` with a value, which beats the others."""
    given = [key for key in keys if values.get(key)]
    if given:
        _beat(values, *given)
    return given[0] if given else None


def _beat(values: Values, winner: str, *losers: str) -> None:
    values.ignored |= {key: f"{winner} is used instead" for key in losers if key in values.known}


def _from_library(document: Any) -> SpeculationConfig | str:
    """vLLM's ``speculative_config``, or why it has no effect. Raises UserError."""
    if not isinstance(document, dict):
        raise UserError(f"is {document!r:.80}; write an object with a method")
    method, model = document.get("method"), document.get("model")
    if method is None and model in _NGRAM_MODELS:
        method = "ngram"
    if document and method is None and model is None:
        raise UserError(f"is {document!r:.80}, which names neither a method nor a model: write one")
    is_model = draft_place(document) is not None
    if method in _METHODS and not is_model:
        raise UserError(f"model is {model!r:.80}; with method {method} write its place")
    if method != "ngram" and not is_model:
        named = f"method {method!r:.40}" if method is not None else f"model {model!r:.40}"
        return f"not available in this version: {named}; tokens are the same without"
    settings = {
        ours: document[theirs]
        for theirs, ours in _FIELDS.items()
        if document.get(theirs) is not None
    }
    if is_model:
        settings.setdefault("max_draft_tokens", _LENGTH)
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
