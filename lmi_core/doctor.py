"""``lmi doctor``: what this machine offers and what the engine makes of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

from lmi_core.version import __version__

_OPTIONAL = (
    ("torch", "GPU memory, reference kernels, Transformers models"),
    ("triton", "Triton kernels"),
    ("flash_attn", "prefills, where it is faster"),
    ("transformers", "models that no family of ours covers"),
    ("huggingface_hub", "models from the Hugging Face hub"),
    ("boto3", "models from S3"),
    ("vllm", "the vLLM backend"),
    ("tensorrt_llm", "the TensorRT-LLM backend"),
    ("vllm_neuron", "the vLLM Neuron backend"),
    ("ray", "replicas over several machines"),
    ("llguidance", "structured output"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and whether it hinders serving."""

    topic: str
    text: str
    is_problem: bool = False


def main(*, as_json: bool = False) -> int:
    """Print the findings; exit code 1 when the engine can't run here."""
    findings = examine()
    if as_json:
        print(json.dumps({finding.topic: finding.text for finding in findings}, indent=2))
    else:
        width = max(len(finding.topic) for finding in findings)
        for finding in findings:
            mark = "!" if finding.is_problem else " "
            print(f"{mark} {finding.topic:<{width}}  {finding.text}")
    return 1 if any(finding.is_problem for finding in findings) else 0


def examine() -> list[Finding]:
    return [
        Finding("lmi", f"{__version__}, Python {platform.python_version()}, {platform.system()}"),
        *_native(),
        *_gpus(),
        _placement(),
        *([*_ops(), _cuda_kernels()] if _asks_for_ops() else []),
        *_packages(),
    ]


def _asks_for_ops() -> bool:
    """Whether what would run on a GPU matters here: 20 lines that others needn't read."""
    from lmi_core.config.targets.gpus import driver_version

    has_gpu = shutil.which("nvidia-smi") is not None or driver_version() is not None
    return has_gpu or bool(os.environ.get("LMI_OPS"))


def _native() -> list[Finding]:
    try:
        from lmi_core import _native as native
    except ImportError as error:
        text = f"the extension can't be loaded ({error}); build it with: pip install -e ."
        return [Finding("lmi engine", text, is_problem=True)]
    info = native.cpu_info()
    levels = native.instruction_sets()
    return [
        Finding("processor", _processor(info)),
        _kernels(levels, native.unbuilt_instruction_sets()),
        Finding(
            "threads",
            f"{native.num_physical_cores()} (physical cores within affinity and quota; "
            f"{info['num_logical_cores']} logical ones in the machine)",
        ),
        _memory(info),
        _repack_cache(),
    ]


def _kernels(levels: list[str], unbuilt: list[str]) -> Finding:
    facts = []
    if levels[:-1]:
        facts.append(f"also built: {', '.join(levels[:-1])}")
    if unbuilt:
        facts.append(f"left out by make run: {', '.join(unbuilt)}; make build adds them")
    return Finding("kernels", levels[-1] + (f" ({'; '.join(facts)})" if facts else ""))


def _processor(info: dict[str, Any]) -> str:
    caches = [f"{level} {_bytes(count)}" for level, count in info["cache_bytes"].items() if count]
    return ", ".join([info["model"] or "unknown", *caches])


def _memory(info: dict[str, Any]) -> Finding:
    total, limit = info["memory_bytes"], info["memory_limit_bytes"]
    unused = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    text = f"{_bytes(total)}, {_bytes(unused)} unused"
    if limit < total:
        text += f"; the control group allows {_bytes(limit)}"
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if addresses != resource.RLIM_INFINITY:
        text += f"; ulimit -v allows {_bytes(addresses)} of addresses"
    return Finding("memory", text)


def _repack_cache() -> Finding:
    from lmi_core.files import repack_directory
    from lmi_core.weights.repack_cache import RepackCache

    directory = repack_directory("auto")
    text = "no home directory" if directory is None else RepackCache(directory, 0).describe()
    return Finding("repack cache", text)


def _gpus() -> list[Finding]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [Finding("GPU", "none found (no nvidia-smi)")]
    fields = "index,name,compute_cap,memory.total,driver_version"
    try:
        result = subprocess.run(
            [program, f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Finding("GPU", f"nvidia-smi failed: {error}")]
    rows = [line.split(", ") for line in result.stdout.splitlines() if line.count(", ") == 4]
    if result.returncode != 0 or not rows:
        return [Finding("GPU", "none found (nvidia-smi lists none)")]
    return [
        _driver(rows[0][4]),
        *(
            Finding(f"GPU {index}", f"{name}, sm_{capability.replace('.', '')}, {memory}")
            for index, name, capability, memory, _ in rows
        ),
    ]


def _driver(named: str) -> Finding:
    from lmi_core.config.targets.gpus import driver_version

    newest = driver_version()
    if newest is None:
        return Finding("driver", f"{named}, whose libcuda.so.1 can't be loaded")
    return Finding("driver", f"{named}, knows CUDA up to {newest[0]}.{newest[1]}")


def _placement() -> Finding:
    """Where a model runs whose configuration doesn't say."""
    from lmi_core.config.problem import Problems
    from lmi_core.config.sources.merge import Values
    from lmi_core.config.targets.host import detect_host
    from lmi_core.config.targets.placement import place

    problems = Problems()
    placement = place(Values(), detect_host(os.environ), "lmi", "common", problems)
    if problems.errors:
        return Finding("models run on", problems.errors[0].message, is_problem=True)
    return Finding("models run on", placement.describe())


def _ops() -> list[Finding]:
    """What would run each op on a GPU, and why."""
    from lmi_core.errors import UserError
    from lmi_core.ops.kernels import select

    try:
        chosen = select.select("cuda")
    except UserError as error:
        return [Finding("GPU ops", str(error), is_problem=True)]
    try:
        invariant = select.describe(select.select_invariant("cuda"))
    except UserError as error:
        invariant = str(error)
    why = select.reasons(chosen)
    return [
        *(Finding(f"GPU {op}", f"{chosen[op]}: {reason}") for op, reason in why.items()),
        Finding("GPU launches", select.describe_launch(chosen)),
        Finding("deterministic", invariant),
    ]


def _cuda_kernels() -> Finding:
    """A library that can't be used is in nobody's way until it is asked for."""
    from lmi_core.errors import UserError
    from lmi_core.ops.kernels import library_file, select

    path = library_file.find()
    if path is None:
        return Finding("CUDA kernels", library_file.missing())
    try:
        is_used = "native" in select.select("cuda").values()
    except UserError:  # the ops' own finding says why
        is_used = False
    reason = select.why_not_native("cuda") or f"LMI_OPS={os.environ.get(select.VARIABLE)}"
    use = "used" if is_used else f"not used unless LMI_OPS=native: {reason}"
    return Finding("CUDA kernels", f"{library_file.describe(path)}; {use}")


def _packages() -> list[Finding]:
    """Versions without importing anything: some of these take seconds to import."""
    findings = []
    for name, purpose in _OPTIONAL:
        if importlib.util.find_spec(name) is None:
            text = f"not installed ({purpose})"
        else:
            text = f"{_version(name)} ({purpose})"
        findings.append(Finding(name, text))
    return findings


def _version(name: str) -> str:
    for distribution in (name, name.replace("_", "-")):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "installed"


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
