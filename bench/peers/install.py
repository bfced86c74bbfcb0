"""Virtual environments of the peers under build/peers, within a time limit, remembered."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LIMIT_S = 20 * 60.0
RECORD = "installation.json"
TORCH = os.environ.get("TORCH", "torch==2.13.0")
"""What pip is asked for where a peer, or its converter, needs PyTorch."""


class InstallError(RuntimeError):
    """A step of an installation or conversion failed, or there was no time left for it."""


@dataclass(frozen=True, slots=True)
class Home:
    """A peer's directory: its environment, sources, models and logs."""

    path: Path
    deadline: float = float("inf")
    """On the monotonic clock; no step runs past it."""

    @property
    def python(self) -> Path:
        return (self.path / "venv/bin/python").absolute()

    def program(self, name: str) -> Path:
        return self.python.parent / name

    def run(self, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> None:
        """Run a step in the home, its output appended to install.log."""
        log_path = self.path / "install.log"
        with log_path.open("ab") as log:
            try:
                subprocess.run(
                    [str(argument) for argument in arguments],
                    cwd=self.path,
                    env=os.environ | dict(environment or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    check=True,
                    timeout=max(0.1, min(self.deadline - time.monotonic(), LIMIT_S)),
                )
            except subprocess.TimeoutExpired:
                raise InstallError(f"out of time in: {arguments[0]} (see {log_path})") from None
            except (subprocess.CalledProcessError, OSError) as error:
                raise InstallError(f"{error} (see {log_path})") from None

    def make_environment(self, requirements: Sequence[str] = ()) -> None:
        shutil.rmtree(self.path / "venv", ignore_errors=True)
        self.run(sys.executable, "-m", "venv", "venv")
        if requirements:
            self.pip("install", *requirements)

    def pip(self, *arguments: str) -> None:
        self.run(self.python, "-m", "pip", "--quiet", *arguments)


@dataclass(frozen=True, slots=True)
class Installation:
    """How an installation went, kept beside it."""

    recipe: str
    error: str
    """Empty: it is there."""
    seconds: float


def install(
    home_path: Path,
    recipe: str,
    steps: Callable[[Home], None],
    *,
    limit_s: float = LIMIT_S,
    retry: bool = False,
) -> Installation:
    """Run the steps unless this recipe was run before; a failure is remembered too, and tried
    again with ``retry``."""
    home_path.mkdir(parents=True, exist_ok=True)
    before = last_installation(home_path, recipe)
    if before is not None and not (before.error and retry):
        return before
    start = time.monotonic()
    error = ""
    try:
        steps(Home(home_path, start + limit_s))
    except InstallError as failure:
        error = str(failure)
    result = Installation(_digest(recipe), error, round(time.monotonic() - start, 1))
    (home_path / RECORD).write_text(json.dumps(asdict(result), indent=2) + "\n")
    return result


def last_installation(home_path: Path, recipe: str) -> Installation | None:
    """How this recipe went before, if it was run."""
    record = home_path / RECORD
    if not record.exists():
        return None
    before = Installation(**json.loads(record.read_text()))
    return before if before.recipe == _digest(recipe) else None


def _digest(recipe: str) -> str:
    return hashlib.sha256(recipe.encode()).hexdigest()[:16]
