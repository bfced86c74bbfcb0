"""``s3://`` URLs of models, and the directory that each is downloaded to."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lmi_core.errors import ModelError


def target_of(url: str, root: Path) -> Path:
    """Return the directory that a download of ``url`` ends in."""
    name = hashlib.sha256("/".join(split_url(url)).encode("utf-8", "replace")).hexdigest()
    return root / "download" / name[:32]


def config_directory(url: str, root: Path) -> Path:
    """Return the directory for what is fetched of ``url`` before the model is."""
    target = target_of(url, root)
    return target.with_name(f"{target.name}.config")


def split_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix of an ``s3://bucket/prefix`` URL; the prefix ends in a slash."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    prefix = prefix.removesuffix("*").strip("/")
    if not url.startswith("s3://") or not bucket:
        raise ModelError(f"{url!r} is not s3://bucket/prefix", field="option.model_id")
    return bucket, f"{prefix}/" if prefix else ""
