"""llama.cpp: llama-bench for the offline rows, llama-server for serving.

Its source comes with the sdist of llama-cpp-python. llama-bench has no sampler in its decode
figure, ours does.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from bench.peers.driver import Load
from bench.peers.install import Home
from bench.peers.load import COMPLETIONS
from bench.peers.peer import GGUF_FILE, GGUF_MIXES, Peer
from bench.peers.process import REPOSITORY, Command, SideError
from bench.peers.side import WORK_S, HttpSide, Side
from bench.peers.work import Figure, Work
from lmi_core.bench.rooflines import GGUF_BYTES

VERSION = "0.3.36"
TARGETS = ("llama-bench", "llama-server", "llama-quantize")
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_CCACHE=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
TOKENS_PER_SLOT = 320
LONG_TOKENS_PER_SLOT = 1280


class LlamaCpp(Peer):
    name = "llama.cpp"
    formats = {
        "bf16": "BF16",
        "int8": "Q8_0 --pure",
        "int4": "Q4_0 --pure",
        **{type_name: f"{type_name.upper()} --pure" for type_name in GGUF_BYTES},
        **{mix: mix.upper() for mix in GGUF_MIXES},
    }
    requirements = (f"llama-cpp-python=={VERSION}", "gguf", "numpy", "cmake<5", "ninja")

    @property
    def _programs(self) -> Path:
        return self.home.path.absolute() / "build/bin"

    def install_steps(self, home: Home) -> None:
        home.make_environment(self.requirements[1:])
        home.pip("download", "--no-deps", "--no-binary=llama-cpp-python", "-d.", self.version)
        (archive,) = home.path.glob(f"llama_cpp_python-{VERSION}.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(home.path, filter="data")
        source = home.path.absolute() / f"llama_cpp_python-{VERSION}/vendor/llama.cpp"
        cmake = home.program("cmake")
        ninja = f"-DCMAKE_MAKE_PROGRAM={home.program('ninja')}"
        home.run(cmake, "-GNinja", ninja, "-S", source, "-B", "build", *CMAKE_OPTIONS)
        jobs = str(len(os.sched_getaffinity(0)))
        home.run(cmake, "--build", "build", "-j", jobs, "--target", *TARGETS)

    def convert(self, checkpoint: Path, dtype: str, target: Path) -> None:
        plain = target / (GGUF_FILE if dtype == "bf16" else "bf16.gguf")
        writer = (self.home.python, "-m", "bench.peers.gguf_writer", checkpoint, plain)
        self.home.run(*writer, environment={"PYTHONPATH": str(REPOSITORY)})
        if dtype != "bf16":
            quantize = self._programs / "llama-quantize"
            kind, *pure = self.formats[dtype].split()
            self.home.run(quantize, *pure, plain, target / GGUF_FILE, kind)
            plain.unlink()

    def engine_side(self, load: Load) -> Side:
        return LlamaBench(self._programs / "llama-bench", load, self.version)

    def server_side(self, load: Load) -> Side:
        def command(port: int) -> Command:
            tokens, cache = TOKENS_PER_SLOT, "--no-cache-prompt --cache-ram 0 --no-kv-unified"
            if load.caches_prefixes:
                tokens, cache = LONG_TOKENS_PER_SLOT, "--cache-prompt"
            options = (
                f"--host 127.0.0.1 --port {port} -t {load.num_threads} -tb {load.num_threads}"
                f" -np {load.max_num_seqs} -c {load.max_num_seqs * tokens} {cache}"
            )
            arguments = [str(self._programs / "llama-server"), "-m", str(_file(load))]
            log = self.home.path.absolute() / "server.log"
            return Command([*arguments, *options.split()], log)

        return HttpSide(command, COMPLETIONS)


class LlamaBench:
    """One run of llama-bench per measurement: it loads, warms up, and times itself."""

    def __init__(self, program: Path, load: Load, version: str) -> None:
        self.about: dict[str, Any] = {"over": "llama-bench", "version": version}
        self._program = program
        self._load = load

    def start(self) -> None:
        if not self._program.exists():
            raise SideError(f"{self._program} is not there: python -m bench.peers install")

    def measure(self, work: Work, seed: int) -> Figure:
        if work.num_requests != 1:
            raise SideError("llama-bench runs one sequence; serving rows need the server")
        counts = (
            f"-p {work.num_prompt} -n 0"
            if work.kind == "prefill"
            else f"-p 0 -n {work.num_new} -d {work.num_prompt}"
        )
        options = f"{counts} -t {self._load.num_threads} -r 1 -o json".split()
        try:
            output = subprocess.run(
                [str(self._program), "-m", str(_file(self._load)), *options],
                capture_output=True,
                check=True,
                timeout=WORK_S,
            ).stdout
        except subprocess.SubprocessError as error:
            raise SideError(str(error)) from error
        return bench_figure(work, json.loads(output)[0]["avg_ts"])

    def stop(self) -> None:
        """Nothing runs between measurements."""


def bench_figure(work: Work, tokens_per_s: float) -> Figure:
    """llama-bench reports a rate alone."""
    if work.kind == "prefill":
        return Figure(tokens_per_s, 1e3 * work.num_prompt / tokens_per_s, None)
    return Figure(tokens_per_s, None, 1e3 / tokens_per_s)


def _file(load: Load) -> Path:
    return load.model / GGUF_FILE
