"""The README's commands and program do what it says, as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmi_core.config.resolve import examine
from tests.cli.test_native import serving

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
SHOWN = re.findall(r"^    \$ ((?:.*\\\n)*.*)\n((?:    (?!\$).+\n)*)", TEXT, re.MULTILINE)
GENERATED = [shown for shown in SHOWN if shown[0].startswith("lmi generate")]
FETCHED = [shown for shown in SHOWN if shown[0].startswith("curl")]
SERVED = re.findall(r"^    (?:\w+=\S+ )?lmi serve (.*)$", TEXT, re.MULTILINE)


def run(command: str) -> str:
    """In a shell that finds ``lmi`` as one does after ``source .venv/bin/activate``."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def unwrapped(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(("command", "answer"), GENERATED)
def test_generate(command: str, answer: str) -> None:
    begin = unwrapped(answer).removesuffix("[...]").strip()
    assert unwrapped(run(command)).startswith(begin)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.mark.parametrize(("command", "answer"), FETCHED)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_requests(url: str, command: str, answer: str) -> None:
    got = unwrapped(run(command.replace("localhost:8080", url.removeprefix("http://"))))
    for part in re.findall(r'"(?:text|content|generated_text)": ?("(?:[^"\\]|\\.)*")', answer):
        assert part in got


@pytest.mark.parametrize("arguments", SERVED)
def test_flags_of_serve_are_known(arguments: str) -> None:
    words = shlex.split(arguments, comments=True)
    faults = [str(error) for error in examine(words, {}).errors]
    assert not [fault for fault in faults if "flag" in fault]


def test_the_program_runs() -> None:
    ((program),) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert "7 + 5 = 12" in done.stdout


def test_the_first_steps_are_there() -> None:
    """The commands that can't be run here, since they build."""
    block = re.search(r"## First steps\n\n((?:    .*\n)+)", TEXT)
    assert block is not None
    commands = [line.split("#")[0].strip() for line in block[1].splitlines()]
    assert commands == ["make run", "source .venv/bin/activate", "lmi chat"]
    dry_run = subprocess.run(
        ["make", "-n", "run"], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert "source " in dry_run.stdout
    assert ".venv/bin/lmi serve --port 8080" in dry_run.stdout


def test_everything_was_found() -> None:
    assert (len(GENERATED), len(FETCHED), len(SERVED)) >= (2, 2, 3)


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 150
