"""Models of the Hugging Face Hub: from the cache on disk if it is whole, else downloaded."""

from __future__ import annotations

import importlib.util
import logging
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmi_core.config.artefacts.local import Check, check_model
from lmi_core.config.paths import is_dir, is_file
from lmi_core.errors import MissingExtraError, ModelError
from lmi_core.files import user_cache

PATTERNS = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
)
"""Files that are fetched: no Python code, and pickled weights only where there are no others."""
PICKLED = ("pytorch_model*.bin", "adapter_model.bin")
"""Fetched beside them for a model that has no safetensors; only tensors are read of them."""
CODE = ("*.py",)
"""Fetched beside them for a model whose own code is trusted."""

_TOKENS = ("HF_TOKEN", "HF_API_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REFERENCE = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)


class _UnreachableError(ModelError):
    """Nobody knows an address of the hub."""


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the directory of the hub's cache, by the variables that the hub's client reads."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(variable):
            return Path(environ[variable])
    home = environ.get("HF_HOME")
    if home:
        return Path(home) / "hub"
    return user_cache(environ) / "huggingface" / "hub"


def snapshot_in_cache(model_id: str, revision: str | None, cache: Path) -> Path | None:
    """Return the snapshot of a model in a hub cache, whole or not; None if there is none."""
    repository = cache / f"models--{model_id.replace('/', '--')}"
    commit = revision or "main"
    if not _COMMIT.fullmatch(commit):
        reference = repository / "refs" / commit
        if not _REFERENCE.fullmatch(commit) or not is_file(reference):
            return None
        commit = reference.read_text(errors="replace").strip()
    snapshot = repository / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and is_dir(snapshot) else None


def find_in_cache(
    model_id: str, revision: str | None, cache: Path, check: Check = check_model
) -> Path | None:
    """Return the snapshot of a model in a hub cache; None unless it is there and whole, as
    ``check`` finds."""
    snapshot = snapshot_in_cache(model_id, revision, cache)
    try:
        if snapshot is not None:
            check(snapshot)
    except ModelError:
        return None
    return snapshot


def fetch_from_hub(
    model_id: str,
    revision: str | None,
    cache: Path | None,
    environ: Mapping[str, str],
    *,
    offline: bool = False,
    with_code: bool = False,
    check: Check = check_model,
    files: Sequence[str] = (),
) -> Path:
    """Return the directory of a hub model's snapshot, ``with_code`` if that is to run; ``files``:
    patterns of those that are wanted, instead of all.

    A commit that is whole in the cache is used as it is; a branch is looked up at the hub first
    unless offline. The hub's client verifies downloads; after an interruption it fetches the files
    that aren't whole again. Raises ModelError with
    the hub's reason, and MissingExtraError if the client isn't installed.
    """
    cache = hub_cache(environ) if cache is None else cache
    found = find_in_cache(model_id, revision, cache, check)
    if found is not None and (offline or _COMMIT.fullmatch(revision or "")):
        return found
    if offline:
        raise _offline(model_id, revision, cache)
    try:
        if files:
            return _download(model_id, revision, cache, environ, [*files])
        patterns = [*PATTERNS, *(CODE if with_code else ())]
        directory = _download(model_id, revision, cache, environ, patterns)
        if not any(directory.glob("*.safetensors")):
            directory = _download(model_id, revision, cache, environ, [*patterns, *PICKLED])
        return directory
    except (MissingExtraError, _UnreachableError):
        if found is None:
            raise
        return found


def _token(environ: Mapping[str, str]) -> str | None:
    """By the variables that TGI's launcher reads, the strongest first."""
    return next((environ[name] for name in _TOKENS if environ.get(name)), None)


def fetch_config_from_hub(
    model_id: str, revision: str | None, cache: Path | None, environ: Mapping[str, str]
) -> None:
    """Have config.json in the cache, or that of an adapter, if the hub can be asked and has it."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        return
    if not _is_known(environ):
        return
    _log_once()
    for name in ("config.json", "adapter_config.json"):
        try:
            hf_hub_download(
                model_id,
                name,
                revision=revision,
                cache_dir=hub_cache(environ) if cache is None else cache,
                token=_token(environ),
                endpoint=environ.get("HF_ENDPOINT") or None,
            )
        except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
            if _has_no_such_file(error):
                continue
        return


def _is_known(environ: Mapping[str, str]) -> bool:
    """Whether the hub's name has an address, or may have one later, or a proxy knows: without, its
    client would try again for half a minute."""
    url = urllib.parse.urlsplit(environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if url.scheme in urllib.request.getproxies() or "all" in urllib.request.getproxies():
        return True
    try:
        return bool(socket.getaddrinfo(url.hostname, url.port))
    except socket.gaierror as error:
        return error.errno not in (socket.EAI_NONAME, socket.EAI_NODATA)


def _unreachable(name: str) -> str:
    return (
        f"the hub can't be reached, and model {name} is neither in the cache nor a directory here"
    )


def _log_once() -> None:
    """Where there is a log, what the client says goes to it, and not to stderr as well."""
    if logging.getLogger().handlers:
        logging.getLogger("huggingface_hub").handlers.clear()


def _has_no_such_file(error: Exception) -> bool:
    """Whether the hub has said so, rather than not answered."""
    return type(error).__name__ in ("EntryNotFoundError", "RemoteEntryNotFoundError")


def check_hub(
    model_id: str,
    revision: str | None,
    cache: Path | None,
    environ: Mapping[str, str],
    *,
    offline: bool = False,
    check: Check = check_model,
) -> None:
    """Raise what ``fetch_from_hub`` would for a model that can't be had from here."""
    cache = hub_cache(environ) if cache is None else cache
    if find_in_cache(model_id, revision, cache, check) is not None:
        return
    if offline:
        raise _offline(model_id, revision, cache)
    if importlib.util.find_spec("huggingface_hub") is None:
        raise _no_client(model_id)


def _offline(model_id: str, revision: str | None, cache: Path) -> ModelError:
    return ModelError(
        f"model {_named(model_id, revision)} is not whole in {cache}, and offline mode forbids to "
        "download it",
        field="option.model_id",
    )


def _no_client(model_id: str) -> MissingExtraError:
    return MissingExtraError(f"downloading {model_id} from the Hugging Face Hub", "hub")


def _download(
    model_id: str,
    revision: str | None,
    cache: Path,
    environ: Mapping[str, str],
    patterns: list[str],
) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise _no_client(model_id) from None
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if not _is_known(environ):
        raise _UnreachableError(_unreachable(_named(model_id, revision)), field="option.model_id")
    _log_once()
    try:
        path = snapshot_download(
            model_id,
            revision=revision,
            cache_dir=cache,
            token=_token(environ),
            allow_patterns=patterns,
            endpoint=environ.get("HF_ENDPOINT") or None,
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise ModelError(_reason(model_id, revision, error), field="option.model_id") from None
    return Path(str(path))


def _named(model_id: str, revision: str | None) -> str:
    return f"{model_id} at {revision}" if revision else model_id


def _reason(model_id: str, revision: str | None, error: Exception) -> str:
    name = _named(model_id, revision)
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return f"model {name} is gated: accept its terms on the hub and set HF_TOKEN"
    if kind == "RepositoryNotFoundError":
        return f"model {name} doesn't exist on the hub, or is private: check it, or set HF_TOKEN"
    if kind == "RevisionNotFoundError":
        return f"model {model_id} has no revision {revision}: check option.revision"
    if kind in ("LocalEntryNotFoundError", "OfflineModeIsEnabled"):
        return _unreachable(name)
    first_line = next(iter(str(error).strip().splitlines()), kind)
    return f"model {name} can't be fetched from the hub ({kind}: {first_line[:200]})"
