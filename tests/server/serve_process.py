"""``lmi serve`` as a process of the test."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class ServeProcess:
    """``lmi serve`` of a directory."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "lmi_core", "serve", str(directory), "--port", "0"]
        self.popen = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self.url = ""

    def wait_until_ready(self) -> None:
        assert self.popen.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("  ready"):
            line = self.popen.stdout.readline()
            assert line, f"the server ended before it listened: {self.read_log()}"
            lines.append(line)
        match = re.search(r"http://\S+:\d+", lines[0])
        assert match is not None
        self.url = match[0]

    def post(
        self, body: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[dict[str, str], bytes]:
        request = urllib.request.Request(
            f"{self.url}/invocations",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return dict(response.headers), response.read()

    def kill(self) -> None:
        """End it without a word, as a machine that fails does."""
        self.popen.kill()
        self.popen.wait()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        self.log.close()

    def read_log(self) -> str:
        self.log.seek(0)
        return self.log.read()


@contextmanager
def serve(directory: Path, *arguments: str) -> Iterator[ServeProcess]:
    process = ServeProcess(directory, *arguments)
    try:
        process.wait_until_ready()
        yield process
        process.popen.terminate()
        assert process.popen.wait(timeout=30) == 0, process.read_log()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.popen.kill()
        process.popen.communicate()
        process.log.close()
