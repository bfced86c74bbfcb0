"""Models that come as archives: by URL, or as files of the model store.

An archive is unpacked once into a directory named by the SHA-256 of its content. What a URL gave
last is remembered beside it, with the server's validators (ETag, Last-Modified), so that a later
start asks whether it changed and fetches it only then.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from lmi_core.config.artefacts.lock import locked, locked_if_free
from lmi_core.config.artefacts.progress import Progress
from lmi_core.config.artefacts.unpack import (
    SUFFIXES,
    Limits,
    announced_bytes,
    is_archive,
    unpack,
)
from lmi_core.errors import ModelError

_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_NOT_MODIFIED = 304
_KEPT_FREE = 0.1
_MOST_KEPT_FREE_BYTES = 1 << 30
"""What archives leave of a disk: a tenth, or 1 GiB where that is less."""
_MAX_RATIO = 50
"""Weights hardly shrink: content so much longer than its archive is no model."""
_ALWAYS_ALLOWED_BYTES = 1 << 30
_PARTIAL = ".partial"
_FETCHED = ".fetched"
_DIGEST = re.compile("[0-9a-f]{64}")
_VALIDATORS = {"ETag": "If-None-Match", "Last-Modified": "If-Modified-Since"}


@dataclass(frozen=True, slots=True)
class Archives:
    """Where archives are unpacked, and what may be had.

    ``url_pattern``: what a URL, and whatever it redirects to, must match as a whole; None: no URL
    may be had. ``fetches``: False: only what is unpacked already is found.
    """

    root: Path
    url_pattern: str | None = None
    offline: bool = False
    fetches: bool = True
    limits: Limits = field(default_factory=Limits)
    made: list[Path] = field(default_factory=list, compare=False)
    """Directories that were unpacked by now, and weren't there before."""

    def discard(self) -> None:
        """Remove what was unpacked: the model is not served."""
        while self.made:
            target = self.made.pop()
            with locked(target):
                shutil.rmtree(target, ignore_errors=True)

    def directory(self, url: str) -> Path:
        """The directory of the model in an archive, given by URL or path; blocking.

        Where the archive holds one directory and nothing beside it, that is the model's.
        ModelError when it can't be had or isn't to be trusted.
        """
        name = _file_name(url) if "://" in url else Path(url).name
        if not is_archive(name):
            raise ModelError(f"{url[:200]!r} is not an archive; allowed are {', '.join(SUFFIXES)}")
        if "://" not in url:
            return _model_directory(self._of_file(Path(url)))
        check_url(url, self.url_pattern)
        return _model_directory(self._of_url(url))

    def _of_file(self, archive: Path) -> Path:
        try:
            with archive.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ModelError(f"{archive} can't be read: {error.strerror or error}") from None
        return self._unpacked(archive, archive.name, digest)

    def _of_url(self, url: str) -> Path:
        name = hashlib.sha256(url.encode("utf-8", "replace")).hexdigest()[:32]
        memory = self.root / "archive" / f"{name}.json"
        if not self.fetches or self.offline:
            known = _read(memory)
            directory = self._known(known)
            if directory is None:
                why = "offline mode forbids to fetch it" if self.offline else "lmi serve fetches it"
                raise ModelError(f"{url[:200]} is not in {self.root}, and {why}")
            return directory
        with locked(memory):
            known = _read(memory)
            is_here = self._known(known) is not None
            file = memory.with_name(memory.name + _FETCHED)
            try:
                found = self._download(url, known if is_here else {}, file)
                directory = self._known(known) if found is None else None
                if found is not None:
                    directory = self._unpacked(file, _file_name(url), found["digest"])
                    memory.write_text(json.dumps(found))
            finally:
                file.unlink(missing_ok=True)
        assert directory is not None, "unchanged means that it is here"
        return directory

    def _known(self, known: Mapping[str, str]) -> Path | None:
        if not _DIGEST.fullmatch(known.get("digest", "")):
            return None
        directory = self._target(known["digest"])
        return directory if directory.is_dir() else None

    def _target(self, digest: str) -> Path:
        return self.root / "archive" / digest[:32]

    def _download(self, url: str, known: Mapping[str, str], file: Path) -> dict[str, str] | None:
        """Fetch into ``file``; None where the server says that what is known hasn't changed."""
        headers = {ask: known[name] for name, ask in _VALIDATORS.items() if name in known}
        opener = urllib.request.build_opener(_Redirects(url, self.url_pattern))
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "lmi", **headers})
            with opener.open(request, timeout=_TIMEOUT_S) as answer:
                digest = self._save(url, answer, file)
                given = {name: answer.headers[name] for name in _VALIDATORS}
        except urllib.error.HTTPError as error:
            with error:
                if error.code == _NOT_MODIFIED:
                    return None
                raise ModelError(f"{url[:200]} can't be fetched: HTTP {error.code}") from None
        except urllib.error.URLError as error:
            raise ModelError(f"{url[:200]} can't be fetched: {error.reason}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise ModelError(f"{url[:200]} can't be fetched: {reason}") from None
        return {"url": url, "digest": digest, **{k: v for k, v in given.items() if v}}

    def _save(self, url: str, answer: Any, file: Path) -> str:
        """Write an answer's body and return its SHA-256; it must be as long as announced."""
        progress, digest, num_bytes = Progress(url[:200]), hashlib.sha256(), 0
        announced = int(answer.headers["Content-Length"] or 0)
        # What is in it takes as much again.
        limit = min(self.limits.max_archive_bytes, _room(file.parent) // 2)
        progress.start(announced)
        with file.open("wb") as out:
            while num_bytes <= limit >= announced and (chunk := answer.read(_CHUNK_BYTES)):
                num_bytes += len(chunk)
                digest.update(chunk)
                out.write(chunk)
                progress.add(len(chunk))
        if max(num_bytes, announced) > limit:
            raise ModelError(
                f"{url[:200]} is longer than {limit} bytes, which is max_archive_size or half of "
                "the room on the disk but for 1 GiB or a tenth of it"
            )
        if announced > num_bytes:
            raise ModelError(f"{url[:200]} ended after {num_bytes} of {announced} bytes")
        progress.finish()
        return digest.hexdigest()

    def _unpacked(self, archive: Path, name: str, digest: str) -> Path:
        target = self._target(digest)
        if target.is_dir():
            return target
        if not self.fetches:
            raise ModelError(f"{archive} is not unpacked yet; lmi serve unpacks it")
        try:
            with locked(target):
                if not target.is_dir():
                    self._unpack(archive, name, target)
        except OSError as error:
            reason = error.strerror or error
            raise ModelError(f"{name} can't be unpacked in {target.parent}: {reason}") from None
        return target

    def _unpack(self, archive: Path, name: str, target: Path) -> None:
        _remove_leftovers(target.parent)
        partial = target.with_name(target.name + _PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        least = announced_bytes(archive, name)
        room = min(self.limits.max_unpacked_bytes, _room(target.parent))
        if least > room:
            raise ModelError(
                f"{name} holds {least} bytes at least, and there is room for {room}: "
                "max_archive_size, and the disk but for 1 GiB or a tenth of it, are the limits"
            )
        room = min(room, max(_ALWAYS_ALLOWED_BYTES, archive.stat().st_size * _MAX_RATIO))
        partial.mkdir()
        try:
            unpack(archive, name, partial, replace(self.limits, max_unpacked_bytes=room))
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        partial.rename(target)
        self.made.append(target)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Goes only where the pattern lets the configuration go."""

    def __init__(self, url: str, pattern: str | None) -> None:
        self._url = url
        self._pattern = pattern

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        try:
            check_url(newurl, self._pattern)
        except ModelError as error:
            raise ModelError(f"{self._url[:200]} redirects elsewhere: {error}") from None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def check_url(url: str, pattern: str | None) -> None:
    """Raise ModelError unless the URL is that of an archive which the pattern allows."""
    if not url.startswith(("http://", "https://")):
        raise ModelError(f"{url[:200]!r} is not an http or https URL")
    if pattern is None or not re.fullmatch(pattern, url):
        having = "which isn't set" if pattern is None else f"which is {pattern[:200]}"
        raise ModelError(f"{url[:200]} does not match model_url_pattern, {having}")


def is_archive_url(url: str) -> bool:
    """Whether the URL is http's and its path that of an archive."""
    return url.startswith(("http://", "https://")) and is_archive(_file_name(url))


def _file_name(url: str) -> str:
    try:
        return unquote(urlsplit(url).path).rpartition("/")[2]
    except ValueError:
        return ""


def _room(place: Path) -> int:
    usage = shutil.disk_usage(place)
    return max(0, usage.free - min(int(usage.total * _KEPT_FREE), _MOST_KEPT_FREE_BYTES))


def _remove_leftovers(directory: Path) -> None:
    """Remove what processes that were killed have left half done."""
    for path in directory.iterdir():
        if path.suffix in (_PARTIAL, _FETCHED):
            with locked_if_free(path.with_suffix("")) as is_free:
                if is_free and path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                elif is_free:
                    path.unlink(missing_ok=True)


def _read(memory: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        known = json.loads(memory.read_text())
        if isinstance(known, dict) and all(isinstance(value, str) for value in known.values()):
            return known
    return {}


def _model_directory(unpacked: Path) -> Path:
    inner = [entry for entry in unpacked.iterdir() if not entry.name.startswith(".")]
    return inner[0] if len(inner) == 1 and inner[0].is_dir() else unpacked
