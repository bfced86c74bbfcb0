"""``lmi bench``: measures a model in this process, or a server, and writes what it measured."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lmi_core.bench.figures import Figure, Run, figures_of, table
from lmi_core.bench.offline import OfflineBench, StepLog
from lmi_core.bench.page import html
from lmi_core.bench.rooflines import ModelShape, dtype_of
from lmi_core.bench.roofs import LEAST_WEIGHT_BYTES
from lmi_core.bench.runner import Pace, Target, engine_target, run_sessions, server_target
from lmi_core.bench.stream import APIS, Answer
from lmi_core.bench.workload import WORKLOADS, Request, Session, Sizes, make_sessions
from lmi_core.chat.answer import RemoteSource
from lmi_core.engine.engine import Engine
from lmi_core.errors import EngineError, UserError
from lmi_core.http_url import HttpUrl, model_beside_url
from lmi_core.local_model import open_local_model
from lmi_core.progress import TerminalProgress
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.version import __version__

_MOST = 1e6
KINDS = ("prefill", "decode", "serve")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--runs", type=_positive, default=5, help="of each measurement (5)")
    add("--json", type=_file, metavar="FILE", help="also write the figures of every run")
    add("--html", type=_file, metavar="FILE", help="also write a page with plots")
    add("--lengths", type=_numbers, default=[512, 2048], help="prefill: of prompts (512,2048)")
    add("--batches", type=_numbers, default=[1, 8, 32], help="decode: sequences (1,8,32)")
    serve = parser.add_argument_group("serve")
    add = serve.add_argument
    add("--url", help="this server instead of a model in this process")
    add("--against", metavar="URL", help="measure another server by turns, and compare")
    add("--protocol", choices=tuple(APIS), default="openai", help="of the servers (openai)")
    add("--workload", choices=tuple(WORKLOADS), default="fixed", help="(fixed)")
    add("--requests", type=_positive, default=64, help="of each run (64)")
    add(
        "--prompt-tokens", type=_positive, default=128, help="about; of a workload's own part (128)"
    )
    add("--new-tokens", type=_positive, default=128, help="of each answer (128)")
    add("--shared-tokens", type=_positive, default=1024, help="prefix, agents: in common (1024)")
    add("--concurrency", type=_positive, default=8, help="requests at once (8)")
    add("--rate", type=_above_0, help="sessions a second instead")
    add("--burstiness", type=_above_0, default=1.0, help="of the rate; 1: Poisson, more: in bursts")
    add("--timeout", type=_above_0, default=600.0, help="of a request, in seconds")
    add("--seed", type=int, default=0, help="of the workload (0)")


def _positive(text: str) -> int:
    value = int(text) if text.strip().isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text[:40]}")
    return value


def _above_0(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) <= _MOST:
            return value
    raise argparse.ArgumentTypeError(f"must be above 0 and at most {_MOST:g}, got {text[:40]}")


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _file(text: str) -> Path:
    """One that can be written, which is better known before hours of measuring than after."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"can't be written: {text}")
    return path


@dataclass(slots=True)
class Results:
    """What was measured, under the names of what it was measured on."""

    title: str
    facts: dict[str, str]
    sides: dict[str, list[Figure]]
    runs: dict[str, list[Run]] = field(default_factory=dict)

    @property
    def text(self) -> str:
        names = list(self.sides)
        facts = "\n".join(f"{name}: {value}" for name, value in self.facts.items())
        against = self.sides[names[1]] if len(names) > 1 else []
        rows = table(self.sides[names[0]], against, names[-1])
        return f"{self.title}\n{facts}\n\n{rows}"

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "facts": self.facts,
            "figures": {
                name: [figure.as_json() for figure in figures]
                for name, figures in self.sides.items()
            },
            "failures": {
                name: [failure for run in runs for failure in run.failures]
                for name, runs in self.runs.items()
            },
        }


def bench(args: argparse.Namespace, words: Sequence[str], default_model: Path) -> int:
    """Measure, print the table, write the files; 1 if a request failed."""
    if args.kind != "serve" and (args.url or args.against):
        raise UserError(f"{args.kind} measures a model in this process; write serve for --url")
    results = asyncio.run(_measure(args, words, default_model))
    print(results.text)
    if args.json is not None:
        args.json.write_text(json.dumps(results.as_json(), indent=1) + "\n")
    if args.html is not None:
        args.html.write_text(html(results.title, results.facts, results.sides, results.runs))
    failures = [failure for runs in results.runs.values() for r in runs for failure in r.failures]
    if failures:
        raise EngineError(f"{len(failures)} sessions failed, the first with {failures[0]}")
    return 0


async def _measure(args: argparse.Namespace, words: Sequence[str], default_model: Path) -> Results:
    if args.url is not None:
        return await _serve(args, {args.url: _server(args, args.url, model_beside_url(words))}, {})
    opened = open_local_model(words, default_model)
    config = replace(opened.config, packs_behind=False)  # speeds as they stay
    if args.kind != "serve":
        config = _for_offline(args, config)
    opened = replace(opened, config=config, found=None)
    progress, log = TerminalProgress(), StepLog()
    async with Engine(opened.asked, observer=log, progress=progress) as engine:
        progress.finish()
        info, name = engine.info.runner, opened.config.served_model_name
        formats = " and ".join(filter(None, (info.dtype, info.quantize)))
        facts = {"model": f"{name}, {formats}", "threads": str(info.num_threads)}
        if args.kind == "serve":
            return await _serve(args, {name: engine_target(engine)}, facts)
        shape = ModelShape.read(opened.config.model)
        dtype = dtype_of(info)
        if info.weight_bytes < LEAST_WEIGHT_BYTES:
            dtype = ""
            facts["roof"] = "none: weights under 128 MiB may stay in the processor's caches"
        offline = OfflineBench(shape, dtype, engine, log)
        await offline.generate(64, 4, seed=0)
        if args.kind == "prefill":
            figures = [await offline.prefill(length, args.runs) for length in args.lengths]
        else:
            figures = [(await offline.decode(batch, args.runs))[0] for batch in args.batches]
    return Results(f"lmi bench {args.kind}", {**_machine(), **facts}, {name: figures})


def _for_offline(args: argparse.Namespace, config: EngineConfig) -> EngineConfig:
    """Without what would spare the work that is measured, and with room for the largest batch."""
    batch = max(config.max_num_seqs, *args.batches)
    return replace(config, enable_prefix_caching=False, max_num_seqs=batch)


def _server(args: argparse.Namespace, url: str, model: str = "") -> Target:
    """Of a model that isn't named: the first that the server lists."""
    parsed, api = HttpUrl.parse(url), APIS[args.protocol]
    if not model and "model" in api.body("", 1):
        with RemoteSource(parsed) as source:
            model = source.model
    return server_target(parsed, api, model)


async def _serve(
    args: argparse.Namespace, targets: dict[str, Target], facts: dict[str, str]
) -> Results:
    """Runs of all targets by turns, after one that warms them up and isn't counted."""
    if args.against is not None:
        again = " again" if args.against in targets else ""  # two of one show what chance does
        targets[args.against + again] = _server(args, args.against)
    sizes = Sizes(
        num_requests=args.requests,
        num_prompt=args.prompt_tokens,
        num_new=args.new_tokens,
        num_shared=args.shared_tokens,
    )
    pace = Pace(
        concurrency=args.concurrency,
        rate=args.rate,
        burstiness=args.burstiness,
        timeout_s=args.timeout,
    )
    runs: dict[str, list[Run]] = {name: [] for name in targets}
    progress = _RequestProgress()
    for i in range(-1, args.runs):
        sessions = make_sessions(args.workload, sizes, seed=args.seed + i)
        for name, target in targets.items():
            part = sessions[: args.concurrency] if i < 0 else sessions
            what = f"{name}: " + (f"run {i + 1} of {args.runs}" if i >= 0 else "warm-up")
            run = await run_sessions(
                progress.counted(target, what, part), part, pace, args.seed + i
            )
            progress.finish()
            if not any(answer.num_tokens for answer in run.answers):
                reason = run.failures[0] if run.failures else "no tokens came"
                raise EngineError(f"{name}: no request was answered; {reason}")
            if i >= 0:
                runs[name].append(run)
    how = f"{args.rate:g}/s" if args.rate else f"{args.concurrency} at once"
    load = f"{args.workload}, {args.requests} requests, {how}, {args.runs} runs"
    facts = {**_machine(), **facts, "load": load}
    if args.url or args.against:
        facts["protocol"] = args.protocol
    sides = {name: figures_of(each) for name, each in runs.items()}
    return Results("lmi bench serve", facts, sides, runs)


class _RequestProgress(TerminalProgress):
    """Of the requests of a run; off a terminal there is none."""

    def counted(self, target: Target, what: str, sessions: Sequence[Session]) -> Target:
        """The target, whose requests are counted as they are answered."""
        if not self._is_terminal:
            return target
        done, total = 0, sum(map(len, sessions))
        self(what, done, total)

        async def do(request: Request) -> Answer:
            nonlocal done
            answer = await target(request)
            done += 1
            self(what, done, total)
            return answer

        return do

    def _line(self, done: int, total: int, seconds: float) -> str:
        return f"{self._what}, {done} of {total} requests"


def _machine() -> dict[str, str]:
    from lmi_core import _native

    model = _native.cpu_info()["model"] or "unknown processor"
    return {"lmi": __version__, "machine": f"{model}, {platform.system()} {platform.machine()}"}
