"""One part of the suite: a command with a time limit, whose failure is recorded and not fatal."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TAIL_CHARS = 3000
CUDA_DIRECTORY = "/usr/local/cuda/bin"
"""Where nvcc is if PATH doesn't say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    command: tuple[str, ...]
    limit_s: float
    tells: str = ""
    """What is known after it, in a few words."""
    environment: Mapping[str, str] = field(default_factory=dict)
    lane: str = ""
    """Neighbours with lanes run at the same time, those with the same one after the other."""
    takes_what_is_left: bool = False
    """Of the time that stages before it didn't need."""


LIMIT = "GPU_SUITE_LIMIT_S"
"""Tells a stage's command its limit."""


def run_stage(stage: Stage, out_dir: Path, left_s: float) -> dict[str, Any]:
    """Run it for at most ``left_s``; its output goes to NAME.log. ``status``: ok, failed, timeout
    or, without time left, skipped."""
    limit_s = min(stage.limit_s, left_s)
    record: dict[str, Any] = {
        "name": stage.name,
        "tells": stage.tells,
        "limit_s": round(limit_s, 1),
    }
    if limit_s < 1.0:
        return {**record, "status": "skipped", "reason": "no time left"}
    log = out_dir / f"{stage.name}.log"
    started_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            stage.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PATH": _path(), LIMIT: f"{limit_s:.0f}", **stage.environment},
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            status = "ok" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            status, code = "timeout", None
        finally:
            _end(process)
    record |= {"status": status, "seconds": round(time.monotonic() - started_s, 1)}
    if status != "ok":
        text = log.read_text(errors="replace")
        record |= {"exit_code": code, "output_tail": text[-TAIL_CHARS:]}
    return record


def _path() -> str:
    """Programs beside this interpreter first: an environment need not have been activated."""
    own = os.environ.get("PATH", os.defpath)
    return os.pathsep.join([str(Path(sys.executable).parent), own, CUDA_DIRECTORY])


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
