"""The suite's stages: what tells most comes first, since the time may not do for all.

Their limits add up to less than LIMIT_S, so that none that hangs takes another one's time.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from bench.gpu.stage import Stage

LIMIT_S = 530.0
DRY_PATIENCE = 12
"""A dry run's limits over those on a GPU: a CPU emulates one, and its builds have few cores."""
SMALL, LARGE = "qwen2-1.5b", "llama3-8b"
TINY = "near-zero"
COSTS = {
    "deterministic": ("--deterministic",),
    "int8-cache": ("--kv-dtype", "int8"),
    "fp8-cache": ("--kv-dtype", "fp8_e4m3fn"),
}
"""What can be measured beside the default kernels, of the smaller shape."""


def _test_files(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/{folder}/test_{name}.py" for name in names)


STEP_TESTS = _test_files("runners/device", "captured_steps", "decode_graphs")
OTHER_TESTS = (
    *_test_files(
        "ops",
        "device_ops",
        "device_linear",
        "device_sampling",
        "device_attention",
        "encoders_attention",
        "device_norms",
        "device_experts",
        "device_latents",
        "coded_caches",
        "coded_results",
        "native_coded_attention",
        "linear_quantized",
        "linear_unpacked",
        "lora_add",
        "staged_copies",
        "invariant_ops",
        "flash",
    ),
    *_test_files(
        "runners/device",
        "cuda_runner",
        "cuda_runner_ahead",
        "cuda_ranks",
        "torch_runner",
        "torch_invariance",
        "torch_drafts",
    ),
    *_test_files("adapters", "torch_lora"),
    *_test_files("structured", "engine"),
)
"""With tests for GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """``is_dry``: on a CPU, in small shapes, with the emulator in the kernels' place."""

    out_dir: Path
    is_dry: bool = False
    prebuilt: Path | None = None

    def stages(self) -> list[Stage]:
        planned = [
            *self._builds(),
            *self._first_contact(),
            *self._steps(),
            *self._turnover(),
            *self._last(),
        ]
        if self.is_dry:
            planned = [self._dry(stage) for stage in planned]
        if self.prebuilt is None:
            return planned
        named = {"LMI_CUDA_LIBRARY": str(self.prebuilt)}
        return [replace(stage, environment={**stage.environment, **named}) for stage in planned]

    def extra_stages(self) -> list[Stage]:
        """What runs only where ``--only`` names it: it takes long, is of less use, or the machine
        may not permit it."""
        costs = [self._engine(SMALL, name, "", "", *options) for name, options in COSTS.items()]
        launches = {
            "native": ("native", "0"),
            "triton": ("triton", "0"),
            "native-dependent": ("native", "1"),
            "native-python": ("native,launch:torch", "0"),
        }
        engines = [
            self._engine(SMALL, name, ops, "what launching costs where steps are short", launch=one)
            for name, (ops, one) in launches.items()
        ]
        others = self._measure("transformers_batching", "transformers", 60, "--shape", SMALL)
        wide = ("--load", "wide", "--quantize", "fp8", "--kv-dtype", "fp8_e4m3fn")
        fp8 = self._measure("turnover", "fp8-512", 150, "--shape", LARGE, *wide, ops="native")
        fp8 = replace(fp8, tells="fp8, 1000 tokens in and 1000 out, 512 requests at once")
        measured = [*engines, *costs, fp8, others]
        if self.is_dry:
            measured = [self._dry(stage) for stage in measured]
        return [*measured, *_sanitizers()]

    def _builds(self) -> list[Stage]:
        # A newer compiler's warnings shall not end the builds; a dry run takes what is built here.
        command = (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
        engine = Stage(
            name="build_engine",
            tells="whether the engine builds here",
            command=command,
            limit_s=90,
            environment={} if self.is_dry else {"CMAKE_ARGS": "-DLMI_WERROR=OFF"},
            lane="engine",
        )
        baseline = self._measure("baseline", "baseline", 60, "--shape", LARGE)
        return [
            engine,
            self._kernel_library(),
            replace(
                self._measure("roofs", "roofs", 20),
                tells="what shares are shares of: copies, reads, bf16 products",
                lane="device",
            ),
            replace(
                baseline,
                tells="what the same decoder takes in plain torch, captured",
                lane="device",
            ),
        ]

    def _kernel_library(self) -> Stage:
        """The kernels' build, or a library of another machine in its place."""
        command, lane = ("bash", "-c", _build_kernels()), "kernels"
        tells = "whether the kernels compile with this machine's nvcc"
        if self.prebuilt is not None:
            command = (sys.executable, "-c", _LOOK_AT_LIBRARY, str(self.prebuilt))
            tells = "whether the library that was built elsewhere fits these sources"
        elif self.is_dry:  # it is built behind the engine, in its folder
            command = ("cmake", "--build", "build/native", "--target", "lmi_cuda_emulator")
            lane = "engine"
        return Stage(
            name="build_kernels",
            tells=tells,
            command=command,
            limit_s=90,
            lane=lane,
        )

    def _first_contact(self) -> list[Stage]:
        rows = "kernels alone, GB/s, TFLOP/s and shares of the roofs"
        return [
            replace(
                self._measure("smoke", "smoke", 25),
                tells="which native kernels run at all, and give what torch gives",
            ),
            replace(self._measure("kernels", "kernels", 40), tells=f"native {rows}"),
            replace(
                self._tests("captured_steps", 30, *STEP_TESTS),
                tells="whether captured steps give uncaptured ones' tokens, by both launchers",
            ),
        ]

    def _steps(self) -> list[Stage]:
        engine = self._engine
        return [
            engine(LARGE, "native", "native", "steps launched by C++, beside roofs and baseline"),
            replace(
                engine(
                    LARGE,
                    "native-dependent",
                    "native",
                    "what dependent launch is worth",
                    launch="1",
                ),
                limit_s=25,
            ),
            replace(engine(LARGE, "triton", "triton", "the same by Triton and torch"), limit_s=35),
            replace(
                engine(LARGE, "int4", "native", "int4 weights beside bf16", "--quantize", "int4"),
                limit_s=25,
            ),
        ]

    def _turnover(self) -> list[Stage]:
        """Of the smaller shape, but for the profiler's."""
        kinds = "requests that come and go: sampling, adapters, grammars"
        loads = [
            replace(
                self._measure("turnover", f"turnover-{name}", 25, "--shape", SMALL, ops=name),
                tells=f"{kinds}, {named}",
            )
            for name, named in (("native", "native"), ("triton", "by Triton and torch"))
        ]
        profile = self._measure("profile", "profile", 35, "--shape", LARGE)
        second = self._measure(
            "engine", "second_gpu", 15, "--shape", SMALL, "--index", "1", ops="native"
        )
        return [
            replace(profile, tells="the four heaviest kernels, and the share of time that is idle"),
            *loads,
            replace(second, tells="whether the second GPU of a process works, where there is one"),
        ]

    def _last(self) -> list[Stage]:
        others = self._measure("kernels", "kernels_others", 30, "--others")
        ready = self._measure("ready", "ready", 40, "--shape", SMALL)
        return [
            replace(others, tells="the same kernels by Triton, torch and other libraries"),
            replace(
                self._tests("tests", 55, *OTHER_TESTS),
                tells="every other test for GPUs",
                takes_what_is_left=True,
            ),
            replace(ready, tells="start-up beyond reading the file, and serving over HTTP"),
        ]

    def _measure(
        self,
        module: str,
        name: str,
        limit_s: float,
        *options: str,
        ops: str = "",
        launch: str = "0",
    ) -> Stage:
        command = [sys.executable, "-m", f"bench.gpu.{module}", *options]
        command += ["--json", str(self.out_dir / f"{name}.json")]
        environment = {"LMI_OPS": ops, "LMI_CUDA_DEPENDENT_LAUNCH": launch}
        return Stage(name=name, command=tuple(command), limit_s=limit_s, environment=environment)

    def _engine(
        self, shape: str, name: str, ops: str, tells: str, *options: str, launch: str = "0"
    ) -> Stage:
        name = f"engine-{shape}-{name}"
        stage = self._measure(
            "engine", name, 30, "--shape", shape, *options, ops=ops, launch=launch
        )
        return replace(stage, tells=tells)

    def _tests(self, name: str, limit_s: float, *files: str) -> Stage:
        select = "not gpu" if self.is_dry else "gpu"
        command = [sys.executable, "-m", "bench.gpu.tests", "--select", select]
        command += ["--json", str(self.out_dir / f"{name}.json"), *files]
        return Stage(name=name, command=tuple(command), limit_s=limit_s)

    def _dry(self, stage: Stage) -> Stage:
        built = self.prebuilt.parent if self.prebuilt else Path("build/native").resolve()
        emulator = {
            "LMI_CUDA_LIBRARY": str(built / "liblmi_cuda_emulator.so"),
            "LMI_CUBLASLT_LIBRARY": str(built / "liblmi_cublaslt_emulator.so"),
            "LMI_NCCL_LIBRARY": str(built / "liblmi_nccl_emulator.so"),
        }
        command = [TINY if part in (SMALL, LARGE) else part for part in stage.command]
        if stage.name == "tests":  # the others are those of `make test`
            command = [part for part in command if part not in OTHER_TESTS]
            command.append("tests/ops/test_select.py")
        elif "bench.gpu.tests" not in command and command[1:2] == ["-m"]:
            command += ["--device", "cpu", "--tiny"]
        environment = {**stage.environment, **emulator}
        if environment.get("LMI_OPS") == "triton":
            environment["LMI_OPS"] = ""  # it has no emulator of a GPU
        return replace(
            stage,
            command=tuple(command),
            limit_s=DRY_PATIENCE * stage.limit_s,
            environment=environment,
        )


def _sanitizers() -> list[Stage]:
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
    launchers = ("test_cuda_runner.py", "test_cuda_runner_ahead.py", "test_captured_steps.py")
    result.append(
        Stage(
            name="dependent_launch",
            command=(*pytest, *(f"tests/runners/device/{name}" for name in launchers)),
            limit_s=120,
            environment={"LMI_CUDA_DEPENDENT_LAUNCH": "1"},
        )
    )
    return result


_LOOK_AT_LIBRARY = """if True:
    import ctypes, runpy, sys
    from pathlib import Path
    library_file, path = runpy.run_path("lmi_core/ops/kernels/library_file.py"), Path(sys.argv[1])
    print(library_file["describe"](path), flush=True)
    sys.exit(library_file["unfit"](path, ctypes.CDLL(str(path)).lmi_cuda_version()) or None)
"""

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
