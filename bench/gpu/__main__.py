"""All stages in order: ``python -m bench.gpu OUT [--device cpu] [--tiny] [--only NAME ...]``.

OUT/suite.json has the machine, and each stage's status, time and, where it failed, the end of its
output; stages write their figures to OUT/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.stage import Stage, run_stage

LIMIT_S = 530.0
COSTS = {
    "deterministic": ("--deterministic",),
    "int8-cache": ("--kv-dtype", "int8"),
    "fp8-cache": ("--kv-dtype", "fp8_e4m3fn"),
}
"""What is measured beside the default kernels, of the smallest shape."""


def _test_files(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


SMOKE_TESTS = _test_files("ops", "device_ops", "device_linear", "device_sampling")
"""What breaks at first contact, kernel by kernel in one process."""
STEP_TESTS = _test_files("runners/device", "captured_steps")
OTHER_TESTS = _test_files(
    "ops",
    "device_attention",
    "coded_caches",
    "coded_results",
    "native_coded_attention",
    "linear_quantized",
    "linear_unpacked",
    "invariant_ops",
    "flash",
) + _test_files("runners/device", "cuda_runner", "torch_runner", "torch_invariance")
"""The others with tests for GPUs."""


def stages(device: str, out_dir: Path, *, tiny: bool, prebuilt: Path | None = None) -> list[Stage]:
    """What tells most comes first: the time may not do for all."""
    python = sys.executable

    def measure(module: str, name: str, limit_s: float, *options: str, **environment: str) -> Stage:
        command = [python, "-m", f"bench.gpu.{module}", "--device", device, *options]
        command += ["--json", str(out_dir / f"{name}.json")] + ["--tiny"] * tiny
        return Stage(name=name, command=tuple(command), limit_s=limit_s, environment=environment)

    def engine(
        shape: str, name: str, forced: str, *options: str, dependent_launch: str = "0"
    ) -> Stage:
        options = ("--shape", shape, *options)
        environment = {"LMI_OPS": forced, "LMI_CUDA_DEPENDENT_LAUNCH": dependent_launch}
        return measure("engine", f"engine-{shape}-{name}", 60, *options, **environment)

    # A newer compiler's warnings shall not end the builds.
    result = [
        Stage(
            name="build_engine",
            command=(python, "setup.py", "--quiet", "build_ext", "--inplace"),
            limit_s=150,
            environment={"CMAKE_ARGS": "-DLMI_WERROR=OFF"},
            is_concurrent=True,
        )
    ]
    roofs = measure("roofs", "roofs", 30)
    kernels = measure("kernels", "kernels", 90)
    small, large = ("near-zero", "near-zero") if tiny else ("qwen2-1.5b", "llama3-8b")
    ready = measure("ready", "ready", 75, "--shape", large)
    costs = [engine(small, name, "", *options) for name, options in COSTS.items()]
    if device == "cpu":
        command = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "test_select")
        result.append(Stage(name="tests", command=(*command, "tests/ops"), limit_s=60))
        return [*result, roofs, kernels, engine(small, "default", ""), *costs, ready]
    result.append(_kernel_library(prebuilt))
    # Roofs are the device's and torch's alone: builds take the processors meanwhile.
    result += [replace(roofs, is_concurrent=True)]
    result += [_tests(out_dir, "smoke", 60, *SMOKE_TESTS), kernels]
    result.append(_tests(out_dir, "captured_steps", 45, *STEP_TESTS))
    result.append(engine(large, "native", "native"))
    if large != small:
        result.append(engine(large, "native-dependent", "native", dependent_launch="1"))
        result.append(engine(large, "default", ""))
        result.append(engine(large, "int4", "native", "--quantize", "int4"))
        result.append(engine(small, "native", "native"))
    result.append(engine(small, "default", ""))
    # What launching costs shows where steps are short.
    result.append(engine(small, "native-dependent", "native", dependent_launch="1"))
    result.append(engine(small, "native-python", "native,launch:torch"))
    result.append(_tests(out_dir, "tests", 110, *OTHER_TESTS))
    result.append(measure("transformers_batching", "transformers", 60, "--shape", small))
    return [*result, *costs, ready]


def _tests(out_dir: Path, name: str, limit_s: float, *files: str) -> Stage:
    command = [sys.executable, "-m", "bench.gpu.tests", "--json", str(out_dir / f"{name}.json")]
    command += ["--limit", str(limit_s - 5), *files]
    return Stage(name=name, command=tuple(command), limit_s=limit_s)


def extra_stages() -> list[Stage]:
    """What runs only where ``--only`` names it: it takes long, or the machine may not permit it."""
    pytest = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu")
    pytest += ("-o", "filterwarnings=default", "--timeout", "400")
    sanitized = (*pytest, "-k", "native", "tests/ops")
    result = [
        Stage(
            name=tool,
            command=("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *sanitized),
            limit_s=LIMIT_S,
            # Each tensor its own memory: within torch's blocks nothing is out of bounds.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        )
        for tool in ("memcheck", "racecheck", "synccheck")
    ]
    launchers = (
        "tests/runners/device/test_cuda_runner.py",
        "tests/runners/device/test_captured_steps.py",
    )
    environment = {"LMI_CUDA_DEPENDENT_LAUNCH": "1"}
    result.append(
        Stage(
            name="dependent_launch",
            command=(*pytest, *launchers),
            limit_s=120,
            environment=environment,
        )
    )
    return result


def _kernel_library(prebuilt: Path | None) -> Stage:
    """The kernels' build, or a library of another machine in its place."""
    command = ("bash", "-c", _build_kernels())
    if prebuilt is not None:
        command = ("cp", str(prebuilt), "lmi_core/liblmi_cuda.so")
    return Stage(name="build_kernels", command=command, limit_s=150, is_concurrent=True)


_PRINT_ARCHITECTURE = 'import torch; print("%d%d" % torch.cuda.get_device_capability())'


def _build_kernels() -> str:
    """For the device's architecture only."""
    return f"""set -e
    architecture=$({sys.executable} -c '{_PRINT_ARCHITECTURE}')
    [ "$architecture" = 90 ] && architecture=90a
    cmake -S . -GNinja -B build/cuda-suite -DLMI_PYTHON=OFF -DLMI_CUDA=ON -DLMI_WERROR=OFF \\
      -DCMAKE_CUDA_ARCHITECTURES="$architecture-real"
    cmake --build build/cuda-suite --target lmi_cuda
    cp build/cuda-suite/liblmi_cuda.so lmi_core/
    """


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
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    print(json.dumps(described))
"""


def groups(planned: Sequence[Stage]) -> list[list[Stage]]:
    """Stages that run at the same time."""
    result: list[list[Stage]] = []
    for stage in planned:
        if result and stage.is_concurrent and result[-1][-1].is_concurrent:
            result[-1].append(stage)
        else:
            result.append([stage])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="directory for the results, made if it isn't there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the stages")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="STAGE",
        help="run only these; also memcheck, racecheck and synccheck, of the compute sanitizer, "
        "and dependent_launch, the launcher's tests with that",
    )
    parser.add_argument(
        "--prebuilt",
        type=Path,
        metavar="FILE",
        help="a liblmi_cuda.so to take instead of building the kernels here",
    )
    parser.add_argument(
        "--plan", action="store_true", help="only say what would run, and each stage's seconds"
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all stages")
    arguments = parser.parse_args()
    prebuilt = arguments.prebuilt and arguments.prebuilt.resolve()
    if prebuilt and not prebuilt.is_file():
        parser.error(f"--prebuilt: there is no file {prebuilt}")
    out_dir = arguments.out.resolve()
    planned = stages(arguments.device, out_dir, tiny=arguments.tiny, prebuilt=prebuilt)
    if arguments.only:
        planned += extra_stages()
    names = [stage.name for stage in planned]
    unknown = set(arguments.only or ()) - set(names)
    if unknown:
        parser.error(f"no stage is called {sorted(unknown)[0]}; there are {', '.join(names)}")
    wanted = [s for s in planned if not arguments.only or s.name in arguments.only]
    if arguments.plan:
        for group in groups(wanted):
            print(*(f"{stage.name} {stage.limit_s:.0f} s" for stage in group), sep=" | ")
        return 0
    out_dir.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    suite: dict[str, Any] = {"machine": machine(arguments.device), "stages": []}
    for group in groups(wanted):
        left_s = arguments.limit - (time.monotonic() - started_s)
        with ThreadPoolExecutor(len(group)) as pool:
            for record in pool.map(partial(run_stage, out_dir=out_dir, left_s=left_s), group):
                suite["stages"].append(record)
                seconds = record.get("seconds", 0)
                print(f"{record['name']:<28} {record['status']:<8} {seconds:6.1f} s", flush=True)
        (out_dir / "suite.json").write_text(json.dumps(suite, indent=2) + "\n")
    return int(any(record["status"] != "ok" for record in suite["stages"]))


if __name__ == "__main__":
    sys.exit(main())
