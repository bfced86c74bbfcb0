"""The driven end of the line protocol: JSON lines on stdin and stdout of an engine's process.

The first line out is ``{"ready": {...}}``, what the engine says of itself. Every line in,
``{"prompts": [[ids]], "num_new": n}``, is answered by ``{"timings": [[first_s, last_s, tokens]]}``
or ``{"error": "..."}``. Standard output is kept for this: what libraries print goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench.peers.work import Timing

Generate = Callable[[list[list[int]], int], list[Timing]]
"""Greedy, end of sequence ignored: prompts submitted at once, new tokens each -> their timings."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a driver is to load."""

    model: Path
    dtype: str
    num_threads: int
    max_num_seqs: int
    caches_prefixes: bool = False
    """Of servers."""


def arguments_of(load: Load) -> list[str]:
    numbers = f"--threads {load.num_threads} --max-num-seqs {load.max_num_seqs}".split()
    return [str(load.model), "--dtype", load.dtype, *numbers]


def parse_load(arguments: list[str] | None = None) -> Load:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parsed = parser.parse_args(arguments)
    return Load(parsed.model, parsed.dtype, parsed.threads, parsed.max_num_seqs)


def drive(open_engine: Callable[[Load], tuple[Generate, dict[str, Any]]]) -> None:
    """Load as the command line says, then answer lines until stdin ends."""
    load = parse_load()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generate, about = open_engine(load)
    _say(out, {"ready": about})
    for line in sys.stdin:
        _say(out, _answer(generate, json.loads(line)))


def _answer(generate: Generate, command: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"timings": generate(command["prompts"], command["num_new"])}
    except Exception as error:  # the harness records it and goes on with other rows
        return {"error": f"{type(error).__name__}: {error}"}


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()
