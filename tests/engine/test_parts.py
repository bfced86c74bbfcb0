"""Tokenizer and grammars, made beside the weights."""

from __future__ import annotations

from typing import Any

import pytest

from lmi_core.demo import MODEL_DIR
from lmi_core.engine import parts as engine_parts
from lmi_core.engine.parts import TextParts, load_parts
from lmi_core.errors import MissingExtraError, ModelError
from lmi_core.models import loader
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.structured import library
from lmi_core.structured.grammar import Grammar

CONFIG = EngineConfig(model=MODEL_DIR, num_threads=1, kv_cache_bytes=4 << 20)


def test_they_are_begun_before_the_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    load: Any = loader.load_weights

    def loaded(*arguments: Any) -> Any:
        done.append("weights")
        return load(*arguments)

    def submitted(*arguments: Any) -> Any:
        done.append("tokenizer")
        return tokenizer(*arguments)

    tokenizer = engine_parts.load_tokenizer
    monkeypatch.setattr(loader, "load_weights", loaded)
    monkeypatch.setattr(engine_parts, "load_tokenizer", submitted)
    parts = load_parts(CONFIG, has_fingerprint=False)
    try:
        assert sorted(done) == ["tokenizer", "weights"]  # once each
        assert parts.texts is not None
        assert parts.load_grammars() is parts.texts.library()
        assert parts.load_grammars().compile(Grammar.regex("a")).matcher().num_allowed([]) == 0
    finally:
        parts.runner.close()
        parts.close()


def test_each_says_what_is_wrong_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = TextParts(CONFIG)
    texts.begin(7, [1])
    with pytest.raises(ModelError, match="7"):
        texts.tokenizer()
    monkeypatch.setattr(library, "is_installed", lambda: False)
    texts.begin(4096, [1])
    assert texts.tokenizer().num_tokens
    with pytest.raises(MissingExtraError):
        texts.library()
    texts.close()
