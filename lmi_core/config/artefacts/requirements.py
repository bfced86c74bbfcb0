"""A model's ``requirements.txt``, installed into a directory of its own, never the server's."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from lmi_core.errors import ModelError

_MARKER = ".lmi-complete"
_TIMEOUT_S = 1800


def install_requirements(
    model: Path,
    root: Path,
    *,
    offline: bool = False,
    python: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Path | None:
    """Install ``model/requirements.txt`` below ``root`` and return that directory.

    Returns None if the model has no such file. ``model/requirements/`` is searched for wheels;
    offline nothing else is. ``python`` is the interpreter that will import them (ours), ``env`` the
    variables that pip and what it builds get (ours). An installation is reused while file and
    interpreter stay the same. Raises ModelError with pip's last words.
    """
    requirements = model / "requirements.txt"
    if not requirements.is_file():
        return None
    text = requirements.read_bytes()
    python = python or sys.executable
    key = b"\0".join((str(model.resolve()).encode(), python.encode(), text))
    name = hashlib.sha256(key).hexdigest()[:32]
    target = root / "requirements" / name
    if (target / _MARKER).is_file():
        return target
    partial = target.with_name(name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _run_pip(python, model, requirements, partial, offline, env)
    (partial / _MARKER).touch()
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return target


def _run_pip(
    python: str,
    model: Path,
    requirements: Path,
    target: Path,
    offline: bool,
    env: Mapping[str, str] | None,
) -> None:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-input", "--target", str(target), "-r", str(requirements)]
    wheels = model / "requirements"
    if wheels.is_dir():
        command += ["--find-links", str(wheels)]
    if offline:
        command += ["--no-index"] if wheels.is_dir() else ["--no-index", "--no-deps"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"installing {requirements} took longer than {_TIMEOUT_S} s") from None
    except OSError as error:
        raise ModelError(f"{python} can't be started ({error.strerror or error})") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        last = (errors or done.stderr.strip().splitlines() or ["no message"])[0]
        raise ModelError(f"{requirements} can't be installed: {last[:300]}")
