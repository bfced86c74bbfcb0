"""The ``load_models`` grammar: which models to serve, under which names.

Source: DJL-Serving's ModelServer.java.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lmi_core.config.artefacts.unpack import SUFFIXES
from lmi_core.config.problem import Problems

_SEPARATORS = re.compile(r"[, ]+")
_ITEM = re.compile(r"(\[?([^?]+?)\]?=)?(.+)", re.DOTALL)
_NOT_WORD = re.compile(r"(\W|^_)")
_DEVICE = re.compile(r"-1|cpu|gpu\d+|nc\d+|\d+", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model to serve: its URL or path, and what its endpoint says; None where it is silent."""

    url: str
    name: str
    where: str
    version: str | None = None
    engine: str | None = None
    devices: tuple[str, ...] = ()


def parse_load_models(text: str, where: str, problems: Problems) -> list[ModelEntry] | None:
    """Return the models that ``text`` lists, or None where it asks for a scan of the store.

    A name and version given twice is an error.
    """
    word = text.strip()
    if word.upper() == "NONE":
        return []
    if not word or word.upper() == "ALL":
        return None
    entries: list[ModelEntry] = []
    for item in filter(None, _SEPARATORS.split(word)):
        entry = _parse_item(item, where, problems)
        if entry is None:
            continue
        if any((e.name, e.version) == (entry.name, entry.version) for e in entries):
            problems.error(where, f"load_models lists the model {entry.name!r} twice")
        else:
            entries.append(entry)
    return entries


def _parse_item(item: str, where: str, problems: Problems) -> ModelEntry | None:
    match = _ITEM.fullmatch(item)
    if match is None:
        problems.error(where, f"load_models item {item[:80]!r} names no model")
        return None
    endpoint, url = match[2], match[3]
    name, version, engine, devices = (*(endpoint or "").split(":"), "", "", "")[:4]
    return ModelEntry(
        url=url,
        name=name or name_of(url),
        where=where,
        version=version or None,
        engine=parse_engine(engine, where, problems, item),
        devices=parse_devices(devices, where, problems, item),
    )


def parse_engine(text: str, where: str, problems: Problems, item: str = "") -> str | None:
    """Return the engine of an endpoint, None where it is silent."""
    if text and text not in ("Python", "MPI", "DeepSpeed", "FasterTransformer"):
        problems.error(where, f"engine {text[:80]!r}{_of(item)} is not Python or MPI")
        return None
    return text or None


def parse_devices(text: str, where: str, problems: Problems, item: str = "") -> tuple[str, ...]:
    """Return the devices of an endpoint; ``*`` and silence are none in particular."""
    if text in ("", "*"):
        return ()
    devices = tuple(part.strip() for part in text.split(";"))
    for device in devices:
        if not _DEVICE.fullmatch(device):
            problems.error(where, f"device {device[:80]!r}{_of(item)} is not like gpu0, nc0, cpu")
    return tuple(f"gpu{device}" if device.isdigit() else device for device in devices)


def _of(item: str) -> str:
    return f" of {item[:80]!r}" if item else ""


def name_of(url: str) -> str:
    """Return the name that a model gets from its path or URL."""
    local = local_path(url) if url.startswith("file:") else None
    path = url.split("?")[0] if local is None else str(local)
    if not path.endswith("/"):
        for suffix in sorted(SUFFIXES, key=len, reverse=True):
            if path.lower().endswith(suffix):
                path = path[: -len(suffix)]
                break
    segment = path.rstrip("/").rpartition("/")[2]
    return _NOT_WORD.sub("_", segment) or "model"


def local_path(url: str) -> Path | None:
    """Return the path of a local model's URL, ``%20`` in it a blank, or of what is a path already;
    None for one of another machine, or of none."""
    if url.startswith("file:"):
        try:
            parts = urlsplit(url)
        except ValueError:  # no host: file://[
            return None
        path = parts.netloc.removeprefix("localhost") + parts.path
        return Path(unquote(path, errors="surrogateescape"))
    return None if "://" in url else Path(url)


def name_of_hub_id(model_id: str) -> str:
    """Return the name that a model named by ``HF_MODEL_ID`` gets: the whole id, made a word."""
    return re.sub(r"\W", "_", model_id) or "model"


_OF_A_MODEL = ("serving.properties", "config.json", "model.py")
"""Files that a directory has as a model; beside them, other directories belong to it."""


def scan_store(store: Path, where: str, problems: Problems) -> list[ModelEntry]:
    """Return the models of a store: each directory or archive, or the store itself as one."""
    try:
        entries = sorted(e for e in store.iterdir() if not e.name.startswith("."))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        problems.error(where, f"model store {str(store)[:200]!r} can't be read ({reason})")
        return []
    if not entries:
        return []
    others = [e for e in entries if not e.is_dir() and not e.name.lower().endswith(SUFFIXES)]
    if others:
        if not any(e.name in _OF_A_MODEL for e in others) and len(others) < len(entries):
            problems.warn(
                where,
                f"model store {store} is read as one model, for it holds {others[0].name[:80]!r}, "
                "which is neither a directory nor an archive; move that away to serve what is "
                "beside it",
            )
        return [ModelEntry(url=str(store), name=name_of(str(store)), where=where)]
    models = []
    for entry in entries:
        directory = _descend(entry)
        if directory is not None:
            models.append(ModelEntry(url=str(directory), name=name_of(entry.name), where=where))
    return models


def _descend(entry: Path) -> Path | None:
    """Skip an empty directory; step into the only directory of one."""
    if not entry.is_dir():
        return entry
    try:
        inner = [e for e in entry.iterdir() if not e.name.startswith(".")]
    except OSError:
        return entry
    if len(inner) == 1 and inner[0].is_dir():
        return inner[0]
    return entry if inner else None
