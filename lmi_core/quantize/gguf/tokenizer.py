"""A model's tokenizer as GGUF's metadata.

Format: keys as llama.cpp's converters write them; ``lmi_core/text/gguf_tokenizer.py`` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from lmi_core.errors import UserError
from lmi_core.files import read_text
from lmi_core.text.calibration_text import DEFAULT_TEXT
from lmi_core.text.gguf_tokenizer import PRE_TOKENIZERS, byte_level, tokenizer_files
from lmi_core.text.template_files import configured_templates, template_files
from lmi_core.text.tokenizer import Tokenizer
from lmi_core.weights.formats import FloatArray
from lmi_core.weights.gguf.file import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "\u2581"
_NO_SCORE = -1e6
"""Of a piece that nothing is merged to."""
PROBE = (
    DEFAULT_TEXT
    + "I'LL  we'Ve 1234567 3.14159   x\n\n\n\ty\r\n\r\n z \u4f60\u597d\u4e16\u754c "
    + "\u3053\u3093\u306b\u3061\u306f \u0661\u0662\u0663 na\u00efve \U0001f600\U0001f680 ...!!?? "
    + "/*//**/ a_b__c <|x|> \u00e9\u0301 \ud55c\uad6d\uc5b4 \u0440\u0443\u0441  \u00a0end   "
)
"""Text on which splitters that differ give different pieces."""


def tokenizer_metadata(
    tokenizer: Tokenizer, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]
) -> dict[str, Any]:
    """The keys of a model's ``tokenizer``, one token for each row of the embedding.

    Raises UserError for one that GGUF has no words for.
    """
    content = tokenizer.content()
    model = content["model"]
    if model.get("type") != "BPE":
        raise _unknown(f"is of type {model.get('type')}; GGUF has BPE and SentencePiece's BPE")
    added = {token["id"]: token for token in content["added_tokens"]}
    tokens, types = _tokens(model["vocab"], added, vocab_size)
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())
    ]
    metadata: dict[str, Any] = {}
    if model.get("byte_fallback"):
        for token_id, token in enumerate(tokens):
            if types[token_id] == _NORMAL and len(token) == 6 and token.startswith("<0x"):
                types[token_id] = _BYTE
        metadata |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": _scores(tokens, merges),
            "tokenizer.ggml.add_space_prefix": _has_prefix(tokenizer),
        }
        if (unknown := model.get("unk_token")) is not None and unknown in tokens:
            types[tokens.index(unknown)] = _UNKNOWN
            metadata["tokenizer.ggml.unknown_token_id"] = tokens.index(unknown)
    else:
        metadata |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _pre_tokenizer(content),
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.merges": merges,
        }
    metadata["tokenizer.ggml.token_type"] = np.array(types, np.int32)
    return metadata | _special(tokenizer, eos_token_ids) | _templates(tokenizer, directory)


def check_tokenizer(tokenizer: Tokenizer, metadata: Mapping[str, Any], path: Path) -> None:
    """Raise UserError unless what ``metadata`` says splits a text as ``tokenizer`` does."""
    content, settings = tokenizer_files(GgufFile(path, metadata, {}))
    read = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)), settings)
    try:
        if read.encode_now(PROBE) != tokenizer.encode_now(PROBE):
            raise _unknown("splits text in a way that none of GGUF's words stands for")
    finally:
        read.close()


def _unknown(problem: str) -> UserError:
    return UserError(
        f"the model's tokenizer {problem}: write another format than GGUF", field="model"
    )


def _tokens(
    vocab: Mapping[str, int], added: Mapping[int, Mapping[str, Any]], vocab_size: int
) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    types = [_UNUSED] * vocab_size
    for token, token_id in vocab.items():
        tokens[token_id], types[token_id] = token, _NORMAL
    for token_id, described in added.items():
        tokens[token_id] = described["content"]
        types[token_id] = _CONTROL if described["special"] else _USER_DEFINED
    return tokens, types


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> FloatArray:
    """Higher ones are merged first."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge.split(" ")), rank)
    return np.array([-float(ranks[t]) if t in ranks else _NO_SCORE for t in tokens], np.float32)


def _has_prefix(tokenizer: Tokenizer) -> bool:
    """Whether text gets a space in front."""
    first = tokenizer.encode_now("x", add_special_tokens=False)[0]
    return tokenizer.tokens()[first].startswith(_SPACE)


def _pre_tokenizer(content: Mapping[str, Any]) -> str:
    ignores_merges = bool(content["model"].get("ignore_merges"))
    wanted = _pieces(content["pre_tokenizer"])
    for name, pre in PRE_TOKENIZERS.items():
        parts = byte_level({}, [], pre)
        if pre.ignores_merges == ignores_merges and _pieces(parts["pre_tokenizer"]) == wanted:
            return name
    raise _unknown("splits text before merges in a way that GGUF has no name for")


def _pieces(pre_tokenizer: Mapping[str, Any] | None) -> list[str]:
    empty: dict[str, Any] = {"type": "BPE", "vocab": {}, "merges": []}
    backend = tokenizers.Tokenizer.from_str(
        json.dumps({"version": "1.0", "model": empty, "pre_tokenizer": pre_tokenizer})
    )
    if backend.pre_tokenizer is None:
        return [PROBE]
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(PROBE)]


def _special(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    eos = tokenizer.eos_token_id
    ends = list(dict.fromkeys([*([] if eos is None else [eos]), *eos_token_ids]))
    found: dict[str, Any] = {}
    for name, token_id in zip(("eos", "eot", "eom"), ends, strict=False):
        found[f"tokenizer.ggml.{name}_token_id"] = token_id
    if (bos := tokenizer.bos_token_id) is not None:
        found["tokenizer.ggml.bos_token_id"] = bos
    pad = tokenizer.config.get("pad_token")
    pad = pad.get("content") if isinstance(pad, Mapping) else pad
    if isinstance(pad, str) and (pad_id := tokenizer.token_id(pad)) is not None:
        found["tokenizer.ggml.padding_token_id"] = pad_id
    ids = tokenizer.encode_now("x")
    found["tokenizer.ggml.add_bos_token"] = bos is not None and ids[:1] == [bos]
    found["tokenizer.ggml.add_eos_token"] = eos is not None and ids[-1:] == [eos]
    return found


def _templates(tokenizer: Tokenizer, directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    templates = configured_templates(tokenizer.config.get("chat_template"), path)
    templates |= {name: read_text(file) for name, file in template_files(directory).items()}
    found: dict[str, Any] = {}
    if "default" in templates:
        found["tokenizer.chat_template"] = templates.pop("default")
        if templates:
            found["tokenizer.chat_templates"] = [*templates]
            found |= {f"tokenizer.chat_template.{n}": text for n, text in templates.items()}
    return found
