"""Archives of models, unpacked without trust in what they say.

Nothing is written outside the directory given, nothing but files and directories comes out, and
what comes out is counted as it is written: sizes in an archive's headers are claims.
"""

from __future__ import annotations

import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from lmi_core.errors import ModelError

SUFFIXES = (".zip", ".jar", ".tar", ".tar.gz", ".tgz", ".tar.z")
_ZIPPED = (".zip", ".jar")
_COMPRESS = b"\x1f\x9d"
"""How the output of compress(1) begins; a .tar.z for DJL-Serving is a tar file under gzip."""
_CHUNK_BYTES = 1 << 20
_MAX_NAME = 1024
_FAULTS = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,  # a compression that zipfile doesn't have
    RuntimeError,  # an encrypted file
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much an archive may be: its own length, that of what is in it, and how many files."""

    max_archive_bytes: int = 64 << 30
    max_unpacked_bytes: int = 64 << 30
    max_files: int = 20_000


class _Member(NamedTuple):
    name: str
    kind: str
    """file, directory, or the name of what isn't unpacked."""
    content: IO[bytes] | None


def is_archive(name: str) -> bool:
    """Whether a file of this name is an archive that ``unpack`` reads."""
    return name.lower().endswith(SUFFIXES)


def announced_bytes(archive: Path, name: str) -> int:
    """What the content of an archive takes at least, by its headers or by its own length."""
    num_bytes = archive.stat().st_size
    if not name.lower().endswith(_ZIPPED):
        return num_bytes
    try:
        with zipfile.ZipFile(archive) as zipped:
            return max(num_bytes, sum(info.file_size for info in zipped.infolist()))
    except _FAULTS:
        return num_bytes  # ``unpack`` says what is wrong.


def unpack(archive: Path, name: str, target: Path, limits: Limits) -> None:
    """Unpack into ``target``, an empty directory; ``name`` says by its end what kind it is.

    ModelError for an archive that is broken, too large, or holds links, devices, absolute names
    or names with ``..``.
    """
    num_bytes = num_files = 0
    try:
        for member in _members(archive, name):
            num_files += 1
            if num_files > limits.max_files:
                raise ModelError(f"{name} holds more than {limits.max_files} files")
            path = target.joinpath(*_parts(name, member.name))
            if member.kind == "directory":
                path.mkdir(parents=True, exist_ok=True)
            elif member.content is None:
                raise ModelError(
                    f"{name} holds {member.name[:200]!r}, which is a {member.kind}; pack files and "
                    "directories only (tar --dereference)"
                )
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                num_bytes += _write(member.content, path, name, limits, num_bytes)
    except FileExistsError as error:
        held = Path(error.filename).relative_to(target)
        raise ModelError(f"{name} holds {str(held)[:200]!r} twice") from None
    except OSError as error:
        raise ModelError(f"{name} can't be unpacked: {error.strerror or error}") from None
    except _FAULTS as error:
        raise ModelError(f"{name} can't be unpacked: {error or type(error).__name__}") from None


def _members(archive: Path, name: str) -> Iterator[_Member]:
    if name.lower().endswith(_ZIPPED):
        yield from _zip_members(archive)
    else:
        yield from _tar_members(archive)


def _tar_members(archive: Path) -> Iterator[_Member]:
    with archive.open("rb") as file:
        if file.read(2) == _COMPRESS:
            raise ValueError("it was packed by compress(1); pack it by gzip (tar -czf)")
    with tarfile.open(archive, "r:*") as tar:
        for info in tar:
            if info.isdir():
                yield _Member(info.name, "directory", None)
            elif info.isreg():
                yield _Member(info.name, "file", tar.extractfile(info))
            else:
                yield _Member(info.name, "link" if info.issym() or info.islnk() else "device", None)


def _zip_members(archive: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(archive) as zipped:
        for info in zipped.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            if info.is_dir():
                yield _Member(info.filename, "directory", None)
            elif kind not in (0, stat.S_IFREG):
                yield _Member(info.filename, "link" if stat.S_ISLNK(kind) else "device", None)
            else:
                with zipped.open(info) as content:
                    yield _Member(info.filename, "file", content)


def _parts(archive_name: str, name: str) -> list[str]:
    """The path of a member below the target; ModelError for one that would leave it."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise ModelError(
            f"{archive_name} holds the name {name[:200]!r}, which would leave the model's directory"
        )
    if len(name) > _MAX_NAME:
        raise ModelError(f"{archive_name} holds a name of {len(name)} characters")
    return parts


def _write(content: IO[bytes], path: Path, name: str, limits: Limits, before_bytes: int) -> int:
    num_bytes = 0
    with path.open("xb") as file:
        while chunk := content.read(_CHUNK_BYTES):
            num_bytes += len(chunk)
            if before_bytes + num_bytes > limits.max_unpacked_bytes:
                raise ModelError(
                    f"{name} holds more than {limits.max_unpacked_bytes} bytes, which is the least "
                    "of max_archive_size, the room on the disk and 50 times the archive's length"
                )
            file.write(chunk)
    return num_bytes
