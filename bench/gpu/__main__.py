"""All stages in order: ``python -m bench.gpu OUT [--dry-run] [--only NAME ...]``.

OUT/suite.json has the machine, and each stage's status, time and, where it failed, the end of its
output; stages write their figures to OUT/NAME.json, and summary.txt has all of them in few words.
results.tar.gz is all of it, made anew after every stage.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu.plan import LIMIT_S, Plan
from bench.gpu.stage import Stage, run_stage
from bench.gpu.summary import archive, judge, summarize


def machine(device: str) -> dict[str, Any]:
    """Asked in a process of its own: this one takes nothing of the GPU, and outlives its faults."""
    described: dict[str, Any] = {"python": platform.python_version()}
    described["nvcc"] = shutil.which("nvcc")
    if device == "cpu":
        described["device"] = platform.processor()
    command = [sys.executable, "-c", _DESCRIBE, device]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return {**described, "error": "torch gave no answer in 60 s"}
    if asked.returncode != 0:
        return {**described, "error": asked.stderr[-1000:]}
    return {**described, **json.loads(asked.stdout)}


_DESCRIBE = """if True:
    import json, sys, torch
    described = {"torch": torch.__version__}
    if sys.argv[1] == "cuda":
        properties = torch.cuda.get_device_properties(0)
        described |= {
            "device": torch.cuda.get_device_name(),
            "num_devices": torch.cuda.device_count(),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    print(json.dumps(described))
"""


PACKAGES = {
    "torch": "everything",
    "tokenizers": "engines",
    "pybind11": "the engine's build",
    "cmake": "builds",
    "ninja": "the kernels' build",
    "pytest": "tests",
    "pytest_timeout": "tests",
    "transformers": "tests of captured steps and others with models, for their checkpoints",
    "jsonschema": "tests of grammars",
    "llguidance": "grammars",
    "aiohttp": "serving",
    "msgspec": "serving",
    "prometheus_client": "serving",
}
"""And programs: what is lost without each."""


def missing_packages() -> dict[str, str]:
    return {name: lost for name, lost in PACKAGES.items() if importlib.util.find_spec(name) is None}


def groups(planned: Sequence[Stage]) -> list[list[list[Stage]]]:
    """What runs one after the other: lanes, which run at the same time."""
    result: list[dict[str, list[Stage]]] = []
    has_lanes = False
    for stage in planned:
        if not (stage.lane and has_lanes):
            result.append({})
        result[-1].setdefault(stage.lane, []).append(stage)
        has_lanes = bool(stage.lane)
    return [list(lanes.values()) for lanes in result]


def seconds_of(group: Sequence[Sequence[Stage]]) -> float:
    """What a group may take."""
    return max(sum(stage.limit_s for stage in lane) for lane in group)


def run_all(planned: Sequence[Stage], out_dir: Path, limit_s: float) -> Iterator[dict[str, Any]]:
    """The records of the stages, in the order in which groups of them end."""
    deadline_s = time.monotonic() + limit_s
    waiting = groups(planned)

    def run_lane(lane: Sequence[Stage]) -> list[dict[str, Any]]:
        return [run_stage(one, out_dir, deadline_s - time.monotonic()) for one in lane]

    while waiting:
        group = waiting.pop(0)
        spare_s = deadline_s - time.monotonic() - sum(map(seconds_of, waiting))
        if group[0][0].takes_what_is_left:
            group = [[replace(group[0][0], limit_s=max(group[0][0].limit_s, spare_s))]]
        with ThreadPoolExecutor(len(group)) as pool:
            for records in pool.map(run_lane, group):
                yield from records


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="directory for the results, made if it isn't there")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="on a CPU: every stage in small shapes, by torch and by the emulator of a GPU",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="STAGE",
        help="run only these; also memcheck, racecheck and synccheck, of the compute sanitizer, "
        "and others of less use, which a wrong name lists",
    )
    parser.add_argument(
        "--prebuilt",
        type=Path,
        metavar="FILE",
        help="a liblmi_cuda.so to take instead of building the kernels here; of a dry run, an "
        "emulator's, with that of cuBLASLt beside it",
    )
    parser.add_argument(
        "--plan", action="store_true", help="only say what would run, and each stage's seconds"
    )
    parser.add_argument("--limit", type=float, help=f"seconds for all stages ({LIMIT_S:.0f})")
    arguments = parser.parse_args()
    if arguments.prebuilt and not arguments.prebuilt.is_file():
        parser.error(f"--prebuilt: there is no file {arguments.prebuilt.resolve()}")
    return arguments


def chosen_stages(arguments: argparse.Namespace) -> list[Stage]:
    prebuilt = arguments.prebuilt and arguments.prebuilt.resolve()
    plan = Plan(out_dir=arguments.out.resolve(), is_dry=arguments.dry_run, prebuilt=prebuilt)
    planned = plan.stages()
    if not arguments.only:
        return planned
    planned += plan.extra_stages()
    names = [stage.name for stage in planned]
    unknown = set(arguments.only) - set(names)
    if unknown:
        sys.exit(f"no stage is called {sorted(unknown)[0]}; there are {', '.join(names)}")
    return [stage for stage in planned if stage.name in arguments.only]


def show_plan(planned: Sequence[Stage]) -> None:
    for group in groups(planned):
        lanes = (
            ", ".join(f"{stage.name} {stage.limit_s:.0f} s: {stage.tells}" for stage in lane)
            for lane in group
        )
        print(*lanes, sep=" | ")
    print(f"at most {sum(map(seconds_of, groups(planned))):.0f} s")


def main() -> int:
    arguments = parse()
    planned = chosen_stages(arguments)
    if arguments.plan:
        show_plan(planned)
        return 0
    out_dir: Path = arguments.out.resolve()
    out_dir.mkdir(parents=True, exist_ok=True)
    patient_s = sum(map(seconds_of, groups(planned)))
    limit_s = arguments.limit or (patient_s if arguments.dry_run else LIMIT_S)
    suite: dict[str, Any] = {"machine": machine("cpu" if arguments.dry_run else "cuda")}
    suite["missing"], suite["stages"] = missing_packages(), []
    for name, lost in suite["missing"].items():
        print(f"{name} is not installed: no {lost}", flush=True)
    for ended in run_all(planned, out_dir, limit_s):
        record = judge(out_dir, ended)
        suite["stages"].append(record)
        times = f"{record.get('seconds', 0):6.1f} of {record['limit_s']:.0f} s"
        print(
            f"{record['name']:<30} {record['status']:<8} {times:<20} {record['tells']}", flush=True
        )
        (out_dir / "suite.json").write_text(json.dumps(suite, indent=2) + "\n")
        archive(out_dir)
    print(summarize(out_dir, suite["stages"]))
    print(f"everything: {archive(out_dir)}")
    return int(any(record["status"] != "ok" for record in suite["stages"]))


if __name__ == "__main__":
    sys.exit(main())
