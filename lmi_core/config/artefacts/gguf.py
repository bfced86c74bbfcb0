"""Models in GGUF: their settings and tokenizer as files, which other models have beside weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from lmi_core.config.paths import is_dir, is_file
from lmi_core.errors import ModelError
from lmi_core.text.gguf_tokenizer import eos_token_ids, tokenizer_files
from lmi_core.weights.content_digest import FileState
from lmi_core.weights.gguf.config import read_config
from lmi_core.weights.gguf.file import GgufFile, gguf_of, read_gguf

SUFFIX = ".gguf"
_VERSION = 1
"""Of what is written; counted up when that changes."""
_MAX_DIRECTORIES = 64
"""Older ones are removed."""


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is a file of that name."""
    return path.suffix == SUFFIX and is_file(path)


def model_directory(path: Path) -> Path:
    """Where the model in ``path`` has its files: ``path``, but of a GGUF file, or of a directory
    with nothing else, a directory in the user's cache with links to it and with what its header
    says as config.json, tokenizer.json and tokenizer_config.json.

    Raises ModelError for a file that can't be read.
    """
    file = path if is_gguf(path) else None
    if file is None:
        if not is_dir(path) or is_file(path / "config.json"):
            return path
        file = gguf_of(path)
    return path if file is None else _unfold(file)


def _unfold(path: Path) -> Path:
    try:
        name = hashlib.sha256(f"{_VERSION} {FileState.of(path).name}".encode()).hexdigest()[:32]
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}", field=path.name) from None
    root = _root()
    target = root / name
    if is_file(target / "config.json") and all(is_file(link) for link in target.glob("*.gguf")):
        return target
    file = read_gguf(path)
    contents = _contents(file)
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _write(file, contents, root, target)
    except OSError:
        # Of a home that can't be written to: for this process alone.
        root = Path(tempfile.mkdtemp(prefix="lmi-gguf-"))
        return _write(file, contents, root, root / name)


def _root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "lmi" / "gguf"


def _contents(file: GgufFile) -> dict[str, dict[str, Any]]:
    tokenizer, settings = tokenizer_files(file)
    config = read_config(file)
    return {
        "config.json": config | {"eos_token_id": eos_token_ids(file)},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
    }


def _write(file: GgufFile, contents: dict[str, dict[str, Any]], root: Path, target: Path) -> Path:
    """A directory that is whole when it has its name."""
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=root))
    try:
        for name, content in contents.items():
            (partial / name).write_text(json.dumps(content, ensure_ascii=False))
        for source in {tensor.path for tensor in file.tensors.values()} | {file.path}:
            (partial / source.name).symlink_to(source.absolute())
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    directories = sorted(root.iterdir(), key=lambda entry: entry.stat().st_mtime_ns)
    for old in directories[:-_MAX_DIRECTORIES]:
        shutil.rmtree(old, ignore_errors=True)
    return target
