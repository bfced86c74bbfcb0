"""What a checkpoint's prompts are pooled to, by its architecture and by the configuration files of
sentence-transformers: modules.json, those of its modules, config_sentence_transformers.json and
sentence_bert_config.json (https://sbert.net/docs/sentence_transformer/usage/custom_models.html)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lmi_core.errors import ModelError, UserError
from lmi_core.files import read_bytes
from lmi_core.weights.hf_config import CLASSIFIER, HfConfig, UnsupportedSettingError

PooledRows = Literal["last", "first", "all"]
"""Whose hidden states make the vector: the last token's, the first one's (CLS), or all (mean)."""

_ROWS: Mapping[str, PooledRows] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "all",
    "pooling_mode_lasttoken": "last",
}
_MODES: Mapping[str, PooledRows] = {"cls": "first", "mean": "all", "lasttoken": "last"}
_ANSWERS = ("no", "yes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpec:
    """How hidden states become an embedding, or the score of a pair of texts."""

    task: Literal["embed", "rerank"]
    rows: PooledRows
    is_causal: bool
    tells_pairs_apart: bool = False
    """Tokens of a pair's second text have a type of their own."""
    normalizes: bool = True
    dense: tuple[Path, ...] = ()
    """Directories of linear layers behind the pooling."""
    answers: tuple[str, str] | None = None
    """Of a model that judges by its next token: those for no and yes."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """By name, what is put before a text."""
    default_prompt: str | None = None
    """The name of the one that is used where none is asked for."""
    max_tokens: int | None = None
    """Of the longest input, where that is less than the model's positions."""


def read_pooling(
    config: HfConfig,
    architecture: str,
    task: Literal["embed", "rerank"],
    *,
    is_causal: bool,
) -> PoolingSpec:
    """The pooling of the model beside ``config``, which is to do ``task``. Raises ModelError for
    files that can't be read, UserError for a task that the model doesn't have,
    UnsupportedSettingError for a pooling that isn't here."""
    directory = config.path.parent
    settings = _object(directory / "config_sentence_transformers.json")
    limits = _object(directory / "sentence_bert_config.json")
    if task == "rerank":
        return _reranker(config, architecture, is_causal, limits.get("max_seq_length"))
    if architecture.endswith(CLASSIFIER):
        raise UserError(
            f"{config.path}: {architecture} scores texts; it has no embeddings: leave the "
            "task out, or write rerank",
            field="task",
        )
    rows: PooledRows = "last" if is_causal else "all"
    dense = []
    for module in _modules(directory):
        kind = str(module.get("type")).rpartition(".")[2]
        path = directory / str(module.get("path"))
        if kind == "Pooling":
            rows = _rows(path / "config.json")
        elif kind == "Dense":
            dense.append(path)
        elif kind not in ("Transformer", "Normalize"):
            raise UnsupportedSettingError(f"{directory}/modules.json: a module of type {kind!r}")
    prompts = settings.get("prompts") or {}
    return PoolingSpec(
        task="embed",
        rows=rows,
        is_causal=is_causal,
        dense=tuple(dense),
        prompts={str(name): str(text) for name, text in prompts.items()},
        default_prompt=settings.get("default_prompt_name"),
        max_tokens=limits.get("max_seq_length"),
    )


def _reranker(
    config: HfConfig, architecture: str, is_causal: bool, max_tokens: int | None
) -> PoolingSpec:
    rows: PooledRows = "last" if is_causal else "first"
    if config.values.get("classifier_pooling") == "mean":
        rows = "all"
    if architecture.endswith(CLASSIFIER):
        num_labels = len(config.settings("id2label") or "12")
        if num_labels != 1:
            raise UnsupportedSettingError(
                f"{config.path}: num_labels is {num_labels}; pairs are scored by classifiers of "
                "one label",
                field="num_labels",
            )
        return PoolingSpec(task="rerank", rows=rows, is_causal=is_causal, max_tokens=max_tokens)
    if config.values.get("model_type") != "qwen3" or not is_causal:
        raise UserError(
            f"{config.path}: {architecture} can't score pairs: that needs a classifier "
            f"({CLASSIFIER}), or Qwen3's answers yes and no",
            field="task",
        )
    return PoolingSpec(
        task="rerank", rows=rows, is_causal=is_causal, answers=_ANSWERS, max_tokens=max_tokens
    )


def _rows(path: Path) -> PooledRows:
    settings = _object(path)
    mode = settings.get("pooling_mode")
    modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value]
    if isinstance(mode, str):
        modes = [mode]
    known = {**_ROWS, **_MODES}
    if len(modes) != 1 or modes[0] not in known:
        raise UnsupportedSettingError(
            f"{path}: pools by {', '.join(modes) or 'nothing'}; here are {', '.join(known)}, one "
            "at a time",
            field="pooling_mode",
        )
    if settings.get("include_prompt") is False:
        raise UnsupportedSettingError(f"{path}: include_prompt is false", field="include_prompt")
    return known[modes[0]]


def _modules(directory: Path) -> list[Mapping[str, Any]]:
    path = directory / "modules.json"
    modules = _read(path)
    if modules is None:
        return []
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelError(f"{path} must hold a list of objects", field=path.name)
    return modules


def _object(path: Path) -> Mapping[str, Any]:
    values = _read(path)
    if values is not None and not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object", field=path.name)
    return values or {}


def _read(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path)) if path.exists() else None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}", field=path.name) from None
