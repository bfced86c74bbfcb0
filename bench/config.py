"""Time of the configuration: ``resolve()`` warm, and ``lmi explain`` from process start.

``python -m bench.config`` prints one line for each: median, 10th and 90th percentile.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lmi_core.config.resolve import resolve
from lmi_core.config.targets.host import Host

PROPERTIES = """\
engine=Python
option.model_id=meta-llama/Llama-2-13b-hf
option.rolling_batch=lmi-dist
option.tensor_parallel_degree=max
option.max_rolling_batch_size=64
option.max_model_len=4096
option.dtype=fp16
option.output_formatter=jsonlines
job_queue_size=500
"""


def time_ms(call: Callable[[], object], num_runs: int) -> list[float]:
    """Return the milliseconds that each of ``num_runs`` calls took, ascending."""
    times = []
    for _ in range(num_runs):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)


def line(name: str, times: list[float]) -> str:
    """Format a row of the result."""
    low, high = times[len(times) // 10], times[len(times) * 9 // 10]
    return f"{name:<32} {statistics.median(times):8.2f} ms  ({low:.2f} to {high:.2f})"


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        Path("model").mkdir()
        Path("model/serving.properties").write_text(PROPERTIES)
        host = Host()
        resolve(["model"], {}, host)
        print(line("resolve(), warm", time_ms(lambda: resolve(["model"], {}, host), 300)))
        command = [sys.executable, "-m", "lmi_core", "explain", "model"]
        explain = time_ms(lambda: subprocess.run(command, capture_output=True, check=True), 20)
        print(line("lmi explain, from process start", explain))


if __name__ == "__main__":
    main()
