"""Random mutations of configurations: never a traceback, always a result or a named error.

``python -m tests.config.fuzz --seconds 600`` runs until the time is up and prints the count; a
failing case is printed as a seed that ``--only SEED`` runs again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from lmi_core.config.explain import Page, as_json, exit_code
from lmi_core.config.judge import judge
from lmi_core.config.resolve import examine
from lmi_core.config.sources.environment import variables_of
from lmi_core.config.table import BY_FLAG, BY_KEY, OPTIONS
from lmi_core.config.targets.engine_settings import runs_in_engine
from lmi_core.config.targets.host import Host

from .cases import CASES, LLAMA, NO_CACHE

NASTY = (
    "",
    " ",
    "0",
    "-1",
    "1",
    "3.0",
    "nan",
    "1e400",
    "9" * 40,
    "9" * 5000,
    "max",
    "true",
    "TRUE",
    "off",
    "auto",
    "{",
    '{"a": 1}',
    "[" * 2000,
    '["a", "b"]',
    "['a']",
    "a,b,,c",
    "\0",
    "\udc80",
    "\ud800x",
    "\u4e2d\u6587",
    "\x1b[31mred",
    "a\nb",
    "../..",
    "/",
    ".",
    "x" * 5000,
    "s3://",
    "s3://b/p",
    "http://[::1",
    "unix:/x",
    "a=b=c",
    "[m:v:Python:0;1]=/x,a::MPI=model",
    "model",
    "org/model",
    "%s%n{}",
    "vllm",
    "scheduler",
    "lmi-dist",
    "trtllm",
    "bitsandbytes8",
    "DeepSpeed",
    "djl_python.huggingface",
    "model.py",
    "https://h/model.py",
)
KEYS = (
    *BY_KEY,
    "",
    "option.",
    "option.zzz",
    "Option.dtype",
    "OPTION_DTYPE",
    "=",
    "\\u00",
    "x" * 300,
)
VARIABLES = tuple(
    sorted(
        {name for option in OPTIONS for name in variables_of(option)}
        | {"OPTION_", "OPTION_zzz", "SERVING_X", "ARGS_x", "OPTION_\udc80", "HF_MODEL_ID"}
        | {"MODEL_ID", "MODEL_SERVER_HOME", "CUDA_VISIBLE_DEVICES"}
    )
)
FLAGS = (*BY_FLAG, "--option", "-o", "-f", "-m", "-s", "--strict", "--prefer-native", "--zzz", "-")
HOSTS = (
    Host(),
    Host(num_gpus=4),
    Host(num_neuron_cores=2),
    Host(packages=frozenset({"vllm", "transformers"})),
)
CONFIGS = (
    b"",
    b"{",
    b"[]",
    b'{"architectures": [1]}',
    b'{"architectures": "x", "max_position_embeddings": true, "quantization_config": []}',
    b'{"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": true}',
    json.dumps(LLAMA).encode(),
)
HANDLERS = ("def handle(inputs): ...", "def handle(", "@output_formatter\ndef f(o): ...", "\0")


@dataclass(frozen=True)
class Input:
    """One configuration: files of the model, arguments, environment and machine."""

    properties: bytes | None
    config: bytes | None
    handler: str | None
    argv: tuple[str, ...]
    environ: dict[str, str]
    host: Host


def make_input(seed: int) -> Input:
    """Return the configuration of a seed: a realistic one, changed in a few places."""
    rng = random.Random(seed)
    case = rng.choice(list(CASES.values()))
    properties = None if case.properties is None else case.properties.encode()
    if properties is None and rng.random() < 0.5:
        properties = b""
    for _ in range(rng.randrange(4)):
        properties = None if properties is None else _mutate_properties(rng, properties)
    argv = list(case.argv) if properties is None or rng.random() < 0.3 else ["model"]
    for _ in range(rng.choice((0, 0, 1, 2, 5))):
        argv.insert(rng.randrange(len(argv) + 1), rng.choice(FLAGS))
        argv.append(_value(rng) if rng.random() < 0.7 else f"{rng.choice(KEYS)}={_value(rng)}")
    environ = {**NO_CACHE, **case.environ}
    for _ in range(rng.choice((0, 0, 1, 3, 8))):
        environ[rng.choice(VARIABLES)] = _value(rng)
    return Input(
        properties,
        rng.choice(CONFIGS) if rng.random() < 0.5 else None,
        rng.choice(HANDLERS) if rng.random() < 0.1 else None,
        tuple(argv),
        environ,
        rng.choice(HOSTS),
    )


def _value(rng: random.Random) -> str:
    option = rng.choice(OPTIONS)
    choices = [choice for some in option.choices.values() for choice in some]
    return rng.choice(choices) if choices and rng.random() < 0.3 else rng.choice(NASTY)


def _mutate_properties(rng: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    place = rng.randrange(len(lines))
    pair = f"{rng.choice(KEYS)}{rng.choice(('=', ': ', ' ', ' = '))}{_value(rng)}"
    kind = rng.randrange(6)
    if kind == 0:
        lines.insert(place, pair.encode("utf-8", "surrogatepass"))
    elif kind == 1:
        lines.pop(place)
    elif kind == 2:
        lines[place] = (
            lines[place].split(b"=")[0] + b"=" + _value(rng).encode("utf-8", "surrogatepass")
        )
    elif kind == 3:
        lines.append(lines[place])
    elif kind == 4:
        lines[place] += rng.choice((b"\\", b"\\u12", b"\\ud800", b" # c", b"\r", b"\xff"))
    else:
        damaged = bytearray(data or b"x")
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        return bytes(damaged)
    return b"\n".join(lines)


def run_input(given: Input, directory: Path) -> None:
    """Run one configuration in ``directory`` and check what comes out of it."""
    model = directory / "model"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir()
    if given.properties is not None:
        (model / "serving.properties").write_bytes(given.properties)
    if given.config is not None:
        (model / "config.json").write_bytes(given.config)
    if given.handler is not None:
        (model / "model.py").write_text(given.handler)
    report = examine(given.argv, given.environ, given.host)
    text = Page().of(report)
    text.encode()
    assert all(line.isprintable() for line in text.splitlines())
    assert json.loads(json.dumps(as_json(report)))["usable"] == (not report.errors)
    assert exit_code(report, strict=False) == (2 if report.errors else 0)
    assert all(problem.message for problem in report.problems)
    assert report.models or report.errors or not given.argv
    if not report.errors:
        for resolved in report.models:
            if runs_in_engine(resolved.backend):
                resolved.engine_config(Path("fetched"))
            faults = judge(resolved, report.server, given.environ).problems
            assert all(fault.message for fault in faults)


def fuzz(seconds: float, seed: int = 0, *, at_least: int = 0) -> int:
    """Run cases from ``seed`` on for a time, and ``at_least`` so many; return how many."""
    deadline = time.monotonic() + seconds
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    done = 0
    with tempfile.TemporaryDirectory(dir=root) as name, contextlib.chdir(name):
        while time.monotonic() < deadline or done < at_least:
            try:
                run_input(make_input(seed + done), Path(name))
            except Exception:
                sys.stderr.write(f"failed: python -m tests.config.fuzz --only {seed + done}\n")
                raise
            done += 1
    return done


def main() -> None:
    """Parse arguments, run, and print how many configurations were tried."""
    parser = argparse.ArgumentParser(prog="python -m tests.config.fuzz")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-least", type=int, default=0, help="go on until so many are done")
    parser.add_argument("--only", type=int, help="run the configuration of one seed")
    args = parser.parse_args()
    if args.only is not None:
        print(make_input(args.only))
        fuzz(0.0, args.only, at_least=1)
        return
    done = fuzz(args.seconds, args.seed, at_least=args.at_least)
    print(f"{done} configurations, none ended in a traceback")


if __name__ == "__main__":
    main()
