"""Tests on a GPU, several files at a time, each in processes of its own.

    python -m bench.gpu.tests --json tests.json --select gpu tests/ops/test_device_linear.py ...

Native kernels' tests come first, and Triton's, whose kernels take long to compile, last. A kernel
that fails may leave a device that answers every further call with the same error, and one that
hangs can't be stopped from within. Either ends the process after that test, and another one goes on
with the tests behind it. Warnings are no errors: other versions of torch may have others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Lock
from typing import Any

from bench.gpu import outcome_notes
from bench.gpu.measure import write
from bench.gpu.stage import LIMIT

MAX_PROCESSES = 8
"""For a file, until those of its tests that were not reached are given up."""
_FINISHED = (0, 1, 5)  # pytest's exit codes for passed, failed, nothing selected
_printing = Lock()
PARTS = ("native", "not native and not triton", "triton and not native")
"""Of a file's tests, for pytest's -k: what matters most first."""


class Runs:
    """``select``: pytest's -m. ``timeout_s``: of a test. ``limit_s``: of all of them."""

    def __init__(self, select: str, *, timeout_s: int, limit_s: float) -> None:
        self._select, self._timeout_s = select, timeout_s
        self._deadline_s = time.monotonic() + limit_s

    def run_files(
        self, files: Sequence[str], num_workers: int, json: Path | None
    ) -> list[dict[str, Any]]:
        results = []
        parts = [(file, part) for part in PARTS for file in files]
        with ThreadPoolExecutor(num_workers) as pool:
            for future in as_completed([pool.submit(self.run_part, *part) for part in parts]):
                result = future.result()
                results.append(result)
                write(json, results)
                counts = dict(Counter(result["outcomes"].values()))
                named = f"{result['file']} ({result['part']})"
                with _printing:
                    print(f"{named}: {counts} {result.get('error', '')}", flush=True)
        return results

    def run_part(self, file: str, part: str) -> dict[str, Any]:
        """The outcome of each of the tests: passed, failed, skipped, or ended, if the process
        did."""
        outcomes: dict[str, str] = {}
        result: dict[str, Any] = {"file": file, "part": part, "outcomes": outcomes}
        reason = f"{MAX_PROCESSES} processes"
        for _ in range(MAX_PROCESSES):
            code, seen, is_finished = self._run_pytest(file, part, outcomes)
            outcomes |= seen
            if is_finished and code in _FINISHED:
                return result
            if not seen or code is None:
                reason = "no time left" if code is None else f"pytest's exit code {code}"
                break
        return {**result, "error": f"not all tests ran: {reason}"}

    def _run_pytest(
        self, file: str, part: str, done: Iterable[str]
    ) -> tuple[int | None, dict[str, str], bool]:
        """The exit code, None if the time was over, and what ``outcome_notes.read`` gives."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-p", outcome_notes.__name__, "-o", "filterwarnings=default"]
        command += ["--timeout", str(self._timeout_s), "--timeout-method=thread"]
        command += ["-m", self._select, "-k", part, file]
        with tempfile.TemporaryDirectory() as directory:
            notes, listed = Path(directory, "notes"), Path(directory, "done")
            notes.touch()
            listed.write_text("\n".join(done))
            names = {outcome_notes.NOTES: str(notes), outcome_notes.DONE: str(listed)}
            try:
                process = subprocess.run(
                    command,
                    env={**os.environ, **names},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    timeout=max(0.0, self._deadline_s - time.monotonic()),
                )
                code, output = process.returncode, process.stdout
            except subprocess.TimeoutExpired:
                code, output = None, f"{file}: no time left"
            with _printing:
                print(output, flush=True)
            return code, *outcome_notes.read(notes)


def has_failed(results: Sequence[dict[str, Any]]) -> bool:
    outcomes = {outcome for result in results for outcome in result["outcomes"].values()}
    return bool(outcomes - {"passed", "skipped"}) or any("error" in result for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--select", default="gpu", help="pytest's -m")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--workers", type=int, default=max(1, min(10, (os.cpu_count() or 1) * 5 // 8))
    )
    parser.add_argument("--timeout", type=int, default=90, help="seconds for a test")
    limit_s = float(os.environ.get(LIMIT, "605")) - 5
    parser.add_argument("--limit", type=float, default=limit_s, help="seconds for all tests")
    arguments = parser.parse_args()
    runs = Runs(arguments.select, timeout_s=arguments.timeout, limit_s=arguments.limit)
    results = runs.run_files(arguments.files, arguments.workers, arguments.json)
    return int(has_failed(results))


if __name__ == "__main__":
    sys.exit(main())
