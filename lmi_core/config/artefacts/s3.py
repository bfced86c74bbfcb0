"""Models under an ``s3://`` prefix: downloaded once, resumed, verified.

With ``s5cmd`` on the path it does the copying, as in the reference; else boto3. A download goes to
a directory of its own that gets its name only when it is whole; the list of objects is kept beside
the files, so that a later start verifies them without the network.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lmi_core.config.artefacts.lock import locked
from lmi_core.config.artefacts.progress import Progress
from lmi_core.config.artefacts.s3_url import config_directory, split_url, target_of
from lmi_core.errors import MissingExtraError, ModelError

MANIFEST = ".lmi-download.json"

MAX_CONFIG_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class S3Object:
    """One object under the prefix: its path below it, its length, and S3's checksum of it."""

    path: str
    size_bytes: int
    etag: str


def fetch_from_s3(
    url: str,
    root: Path,
    environ: Mapping[str, str],
    progress: Progress | None = None,
    *,
    offline: bool = False,
) -> Path:
    """Return a directory with everything under ``url``, downloading what isn't here yet.

    Raises ModelError with S3's reason, and MissingExtraError if boto3 is needed and absent.
    """
    bucket, prefix = split_url(url)
    target = target_of(url, root)
    if _is_whole(target):
        return target
    if offline:
        raise _offline(url, root)
    progress = progress or Progress(url)
    with locked(target):
        if not _is_whole(target):
            partial = _partial(target)
            s5cmd = shutil.which("s5cmd", path=environ.get("PATH"))
            if s5cmd is not None:
                _copy_with_s5cmd(s5cmd, url, partial, environ, progress)
            else:
                _copy_with_boto3(url, bucket, prefix, partial, progress)
            partial.rename(target)
            progress.finish()
    return target


def fetch_config_from_s3(url: str, root: Path, environ: Mapping[str, str]) -> None:
    """Have the config.json under ``url`` in ``config_directory``, if S3 can be asked and has it."""
    bucket, prefix = split_url(url)
    directory = config_directory(url, root)
    directory.mkdir(parents=True, exist_ok=True)
    target, part = directory / "config.json", directory / f"config.json.{os.getpid()}"
    s5cmd = shutil.which("s5cmd", path=environ.get("PATH"))
    if s5cmd is not None:
        command = [s5cmd, "cp", f"s3://{bucket}/{prefix}config.json", str(part)]
        subprocess.run(command, capture_output=True, env=dict(environ), check=False)
    elif importlib.util.find_spec("boto3") is not None:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError

        with contextlib.suppress(BotoCoreError, ClientError, OSError):
            body = boto3.client("s3").get_object(Bucket=bucket, Key=f"{prefix}config.json")["Body"]
            part.write_bytes(body.read(MAX_CONFIG_BYTES))
    if part.is_file():
        part.replace(target)


def check_s3(url: str, root: Path, environ: Mapping[str, str], *, offline: bool = False) -> None:
    """Raise what ``fetch_from_s3`` would for a model that can't be had from here."""
    if _is_whole(target_of(url, root)):
        return
    if offline:
        raise _offline(url, root)
    has_s5cmd = shutil.which("s5cmd", path=environ.get("PATH")) is not None
    if not has_s5cmd and importlib.util.find_spec("boto3") is None:
        raise _no_client(url)


def _offline(url: str, root: Path) -> ModelError:
    return ModelError(
        f"{url} is not in {root}, and offline mode forbids to download it", field="option.model_id"
    )


def _no_client(url: str) -> MissingExtraError:
    return MissingExtraError(f"downloading {url} without s5cmd on the path", "hub")


def _partial(target: Path) -> Path:
    """Return the directory to download into; what an earlier try left is kept and continued."""
    partial = target.with_name(target.name + ".partial")
    if target.exists() and not partial.exists():
        target.rename(partial)
    elif target.exists():
        shutil.rmtree(target)
    partial.mkdir(exist_ok=True)
    return partial


def _is_whole(directory: Path) -> bool:
    """Tell whether every object that was listed is here with its full length."""
    try:
        objects = json.loads((directory / MANIFEST).read_bytes())
        return all(
            (directory / entry["path"]).stat().st_size == entry["size_bytes"] for entry in objects
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_manifest(directory: Path, objects: list[S3Object]) -> None:
    (directory / MANIFEST).write_text(json.dumps([asdict(entry) for entry in objects]))


def _copy_with_s5cmd(
    s5cmd: str, url: str, directory: Path, environ: Mapping[str, str], progress: Progress
) -> None:
    pattern = url.removesuffix("*").rstrip("/") + "/*"
    command = [s5cmd, "--retry-count", "3", "sync", pattern, f"{directory}/"]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environ), check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ModelError(f"s5cmd can't fetch {url}: {lines[-1][:300]}", field="option.model_id")
    objects = [
        S3Object(str(path.relative_to(directory)), path.stat().st_size, "")
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    ]
    if not objects:
        raise ModelError(f"there is nothing under {url}", field="option.model_id")
    progress.add(sum(entry.size_bytes for entry in objects))
    _write_manifest(directory, objects)


def _copy_with_boto3(
    url: str, bucket: str, prefix: str, directory: Path, progress: Progress
) -> None:
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise _no_client(url) from None
    try:
        client = boto3.client("s3")
        objects = _list(client, bucket, prefix)
        if not objects:
            raise ModelError(f"there is nothing under {url}", field="option.model_id")
        progress.start(sum(entry.size_bytes for entry in objects))
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            copies = [
                pool.submit(_copy, client, bucket, prefix, entry, directory, progress)
                for entry in objects
            ]
            try:
                for copy in copies:
                    copy.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    except (BotoCoreError, ClientError) as error:
        raise ModelError(f"{url} can't be fetched: {error}", field="option.model_id") from None
    except OSError as error:
        raise ModelError(f"{url} can't be stored in {directory}: {error}") from None
    _write_manifest(directory, objects)


def _list(client: Any, bucket: str, prefix: str) -> list[S3Object]:
    objects = []
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", ()):
            path = entry["Key"][len(prefix) :]
            if not path or path.endswith("/"):
                continue
            if ".." in PurePosixPath(path).parts or path.startswith("/"):
                raise ModelError(f"object {entry['Key']!r} would leave the model's directory")
            objects.append(S3Object(path, entry["Size"], entry["ETag"].strip('"')))
    return objects


def _copy(
    client: Any, bucket: str, prefix: str, entry: S3Object, directory: Path, progress: Progress
) -> None:
    """Fetch one object; a part of it that is here from the same version is kept."""
    final = directory / entry.path
    part = final.with_name(f"{final.name}.{entry.etag[:16]}.part")
    if final.is_file() and final.stat().st_size == entry.size_bytes and _matches(final, entry):
        progress.add(entry.size_bytes)
        return
    final.parent.mkdir(parents=True, exist_ok=True)
    here_bytes = part.stat().st_size if part.is_file() else 0
    if here_bytes > entry.size_bytes:
        here_bytes = 0
    progress.add(here_bytes)
    if here_bytes < entry.size_bytes or entry.size_bytes == 0:
        _append(client, bucket, prefix, entry, part, here_bytes, progress)
    if part.stat().st_size != entry.size_bytes or not _matches(part, entry):
        part.unlink()
        raise ModelError(
            f"s3://{bucket}/{prefix}{entry.path} arrived broken (its checksum differs); start again"
        )
    part.replace(final)


def _append(
    client: Any,
    bucket: str,
    prefix: str,
    entry: S3Object,
    part: Path,
    here_bytes: int,
    progress: Progress,
) -> None:
    arguments = {"Bucket": bucket, "Key": prefix + entry.path, "IfMatch": f'"{entry.etag}"'}
    if here_bytes:
        arguments["Range"] = f"bytes={here_bytes}-"
    body = client.get_object(**arguments)["Body"]
    with part.open("ab" if here_bytes else "wb") as file:
        for chunk in body.iter_chunks(_CHUNK_BYTES):
            file.write(chunk)
            progress.add(len(chunk))
        file.flush()
        os.fsync(file.fileno())


def _matches(path: Path, entry: S3Object) -> bool:
    """Compare with S3's checksum; that of a multipart upload isn't an MD5 and says nothing."""
    if "-" in entry.etag or len(entry.etag) != 32:
        return True
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == entry.etag
