"""Models in GGUF: their settings and tokenizer as files, which other models have beside weights."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmi_core.errors import ModelError
from lmi_core.files import user_cache
from lmi_core.weights.gguf.names import PATTERN, is_later_part

if TYPE_CHECKING:
    from lmi_core.weights.gguf.file import GgufFile

_VERSION = 3
"""Of what is written; counted up when that changes."""
_MAX_DIRECTORIES = 64
"""Older ones are removed."""
_MAX_STEM = 40
"""Characters of a file's name, of at most 4 bytes each."""


def is_gguf(path: Path) -> bool:
    """Whether ``path`` is something of that name, in whatever case, but a directory; what can't be
    a path isn't."""
    try:
        return path.match(PATTERN) and path.exists() and not path.is_dir()
    except (OSError, ValueError):
        return False


def named_file(directory: Path, name: str) -> Path:
    """The GGUF file of a repository that ``name`` says: its own name, or a part of it as in
    ``Q4_K_M``. Raises ModelError unless there is one."""
    files = sorted(path for path in directory.rglob(PATTERN) if not is_later_part(path))
    found = [path for path in files if path.name == name]
    found = found or [path for path in files if name.lower() in path.stem.lower()]
    if len(found) != 1:
        which = ", ".join(path.name for path in found or files) or "none"
        raise ModelError(
            f"{directory} has {len(found)} GGUF files named {name[:80]!r}; name one of: {which}",
            field="option.model_id",
        )
    return found[0]


def file_patterns(name: str) -> tuple[str, ...]:
    """What a repository calls the files that ``named_file`` finds, as shells match them."""
    if Path(name).match(PATTERN):
        return name, name.replace("-00001-of-", "-0*-of-")
    return tuple(dict.fromkeys(f"*{tag}{PATTERN}" for tag in (name, name.lower(), name.upper())))


def model_directory(path: Path) -> Path:
    """Where the model in ``path`` has its files: ``path``, but of a GGUF file, or of a directory
    without other weights, a directory in the user's cache with links to it and with what its header
    says as config.json, tokenizer.json and tokenizer_config.json.

    Raises ModelError for a file that can't be read.
    """
    file = path if is_gguf(path) else None
    if file is None:
        if not _is_dir(path) or not any(path.glob(PATTERN)):
            return path
        if (path / "config.json").is_file() and _has_weights_of_its_own(path):
            return path
        from lmi_core.weights.gguf.file import gguf_of

        file = gguf_of(path)
    return path if file is None else _unfold(file)


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _has_weights_of_its_own(directory: Path) -> bool:
    """Whether its config.json goes with what is there, and isn't just beside a GGUF file."""
    if any(directory.glob("*.bin")):
        return True
    from lmi_core.files import read_json_object

    return "gguf" in read_json_object(directory / "config.json")


def _unfold(path: Path) -> Path:
    from lmi_core.weights.content_digest import FileState
    from lmi_core.weights.gguf.file import read_gguf

    try:
        state = hashlib.sha256(f"{_VERSION} {FileState.of(path).name}".encode()).hexdigest()
    except OSError as error:
        raise ModelError(f"{path} can't be read: {error.strerror}", field=path.name) from None
    root = _root()
    # Errors of what is in it name the directory: its reader knows the file.
    name = f"{path.stem[:_MAX_STEM]}-{state[:32]}"
    target = root / name
    if (target / "config.json").is_file() and all(link.is_file() for link in target.glob(PATTERN)):
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
    return user_cache(os.environ) / "lmi" / "gguf"


def _contents(file: GgufFile) -> dict[str, dict[str, Any]]:
    from lmi_core.text.gguf_tokenizer import eos_token_ids, tokenizer_files, tokenizer_notes
    from lmi_core.weights.gguf.config import read_config

    tokenizer, settings = tokenizer_files(file)
    config = read_config(file)
    config["gguf"]["notes"] += tokenizer_notes(file)
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
            (partial / name).write_bytes(json.dumps(content, ensure_ascii=False).encode())
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
