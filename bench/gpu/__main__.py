"""All stages in order: ``python -m bench.gpu OUT [--device cpu] [--tiny] [--only NAME ...]``.

OUT/suite.json has the machine, and each stage's status, time and, where it failed, the end of its
output; stages write their figures to OUT/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu.stage import Stage, run_stage

LIMIT_S = 530.0
KERNEL_CHOICES = {
    "default": "",
    "native": "native",
    "native-python": "native,launch:torch",
    "torch": "torch",
}
"""Values of LMI_OPS that the engine is measured with."""

COSTS = {
    "deterministic": ("--deterministic",),
    "int8-cache": ("--kv-dtype", "int8"),
    "fp8-cache": ("--kv-dtype", "fp8_e4m3fn"),
}
"""What is measured beside the default kernels, of the smallest shape."""


def stages(device: str, out_dir: Path, *, tiny: bool) -> list[Stage]:
    python = sys.executable

    def measure(module: str, name: str, limit_s: float, *options: str, **environment: str) -> Stage:
        command = [python, "-m", f"bench.gpu.{module}", "--device", device, *options]
        command += ["--json", str(out_dir / f"{name}.json")] + ["--tiny"] * tiny
        return Stage(name=name, command=tuple(command), limit_s=limit_s, environment=environment)

    result = [
        Stage(
            name="build_engine",
            command=(python, "setup.py", "--quiet", "build_ext", "--inplace"),
            limit_s=150,
        )
    ]
    if device == "cuda":
        result.append(
            Stage(name="build_kernels", command=("bash", "-c", _build_kernels()), limit_s=150)
        )
    result.append(measure("roofs", "roofs", 30))
    engine_tests = ("torch_runner", "decode_graphs", "torch_invariance")
    tests = ["tests/ops", *(f"tests/engine/test_{name}.py" for name in engine_tests)]
    chosen = "gpu" if device == "cuda" else "test_select"
    by = ["-m", chosen] if device == "cuda" else ["-k", chosen]
    command = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *by, *tests)
    result.append(Stage(name="tests", command=command, limit_s=120))
    if device == "cuda":
        some = "same_bits or captured_decode or ahead or split"
        command = (*command[: -len(tests)], "-k", some, "tests/engine/test_cuda_runner.py")
        result.append(Stage(name="tests-launcher", command=command, limit_s=60))
    result.append(measure("kernels", "kernels", 90))
    shapes = ["near-zero"] if tiny else ["qwen2-1.5b", "llama3-8b"]
    for shape in shapes:
        for choice, forced in KERNEL_CHOICES.items():
            if choice == "torch" and not tiny:
                continue  # its attention gathers the cache: correct everywhere, fast nowhere
            if device == "cpu" and choice.startswith("native"):
                continue
            if choice == "native-python" and shape != shapes[0]:
                continue  # what launching costs shows where steps are short
            name = f"engine-{shape}-{choice}"
            result.append(measure("engine", name, 60, "--shape", shape, LMI_OPS=forced))
    for name, options in COSTS.items():
        options = ("--shape", shapes[0], *options)
        result.append(measure("engine", f"engine-{shapes[0]}-{name}", 60, *options, LMI_OPS=""))
    if not tiny:
        shape, forced = shapes[-1], "native"
        name = f"engine-{shape}-int4"
        options = ("--shape", shape, "--quantize", "int4")
        result.append(measure("engine", name, 60, *options, LMI_OPS=forced))
    if device == "cuda":  # which its continuous batching wants
        result.append(measure("transformers_batching", "transformers", 60, "--shape", shapes[0]))
    result.append(measure("ready", "ready", 90, "--shape", shapes[-1]))
    return result


def extra_stages() -> list[Stage]:
    """What runs only where ``--only`` names it: it takes long, or the machine may not permit it."""
    tests = ["-m", "gpu", "-k", "native", "tests/ops"]
    checked = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    return [
        Stage(
            name=tool,
            command=("compute-sanitizer", "--tool", tool, "--error-exitcode", "1", *checked),
            limit_s=LIMIT_S,
        )
        for tool in ("memcheck", "racecheck", "synccheck")
    ]


def _build_kernels() -> str:
    """For the device's architecture only."""
    return """set -e
    architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
    [ "$architecture" = 90 ] && architecture=90a
    cmake -S . -GNinja -B build/cuda-suite -DLMI_PYTHON=OFF -DLMI_CUDA=ON \\
      -DCMAKE_CUDA_ARCHITECTURES="$architecture-real"
    cmake --build build/cuda-suite --target lmi_cuda
    cp build/cuda-suite/liblmi_cuda.so lmi_core/
    """


def machine(device: str) -> dict[str, Any]:
    import torch

    described: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nvcc": shutil.which("nvcc"),
        "device": platform.processor() if device == "cpu" else torch.cuda.get_device_name(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        described |= {
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return described


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="directory for the results, made if it isn't there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the stages")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="STAGE",
        help="run only these; also memcheck, racecheck and synccheck, of the compute sanitizer",
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all stages")
    arguments = parser.parse_args()
    out_dir = arguments.out.resolve()
    out_dir.mkdir(parents=True, exist_ok=True)
    planned = stages(arguments.device, out_dir, tiny=arguments.tiny)
    if arguments.only:
        planned += extra_stages()
    names = [stage.name for stage in planned]
    unknown = set(arguments.only or ()) - set(names)
    if unknown:
        parser.error(f"no stage is called {sorted(unknown)[0]}; there are {', '.join(names)}")
    started_s = time.monotonic()
    suite: dict[str, Any] = {"machine": machine(arguments.device), "stages": []}
    for stage in planned:
        if arguments.only and stage.name not in arguments.only:
            continue
        left_s = arguments.limit - (time.monotonic() - started_s)
        record = run_stage(stage, out_dir, left_s)
        suite["stages"].append(record)
        print(f"{record['name']:<28} {record['status']:<8} {record.get('seconds', 0):6.1f} s")
        (out_dir / "suite.json").write_text(json.dumps(suite, indent=2) + "\n")
    return int(any(record["status"] != "ok" for record in suite["stages"]))


if __name__ == "__main__":
    sys.exit(main())
