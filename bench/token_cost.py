"""What a streamed token costs, and whom: microseconds of processor time, by threads.

    python -m bench.token_cost                                  64 streams of the near-zero model
    python -m bench.token_cost --shape 160m --rounds 3
    python -m bench.token_cost --beside ../before --rounds 9    two working copies, by turns

``loop``: the server's thread that schedules, makes text and frames, and sends them; ``kernels``:
the worker's threads; ``client``: this process, which reads the streams. Medians of the rounds, and
tokens a second. Only processor time is compared well beside other load; the rate isn't.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.checkpoints import SHAPES, checkpoint
from bench.peers.load import COMPLETIONS, wave
from bench.peers.work import WORKS, Work, make_prompts, text_of
from bench.server_process import ServerProcess, started

_WORK = WORKS["serve64"]
_TIMEOUT_S = 300.0
_COLUMNS = ("loop", "kernels", "other", "client", "tokens/s")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one wave of streams."""

    loop: float
    kernels: float
    other: float
    client: float
    tokens_per_s: float


def threads_us(pid: int) -> dict[str, float]:
    """Processor time of a process' threads by kind; its first is the loop's."""
    spent = dict.fromkeys(_COLUMNS[:3], 0.0)
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text()
        kind = "kernels" if name.startswith(("lmi-worker", "lmi-pool")) else "other"
        kind = "loop" if task.name == str(pid) else kind
        spent[kind] += 1e-3 * int((task / "schedstat").read_text().split()[0])
    return spent


def measure(server: ServerProcess, work: Work, seed: int) -> Cost:
    texts = [text_of(prompt) for prompt in make_prompts(work, seed)]
    before, client_s, begin = threads_us(server.pid), time.process_time(), time.perf_counter()
    answers = asyncio.run(wave(server.port, COMPLETIONS, texts, work.num_new, _TIMEOUT_S))
    seconds, client_s = time.perf_counter() - begin, time.process_time() - client_s
    after, count = threads_us(server.pid), sum(answer.num_tokens for answer in answers)
    loop, kernels, other = ((after[kind] - before[kind]) / count for kind in _COLUMNS[:3])
    return Cost(loop, kernels, other, 1e6 * client_s / count, count / seconds)


def command(tree: Path, shape: str, num_streams: int) -> list[str]:
    """Of a server that runs the code of a working copy."""
    python = ["env", f"PYTHONPATH={tree.absolute()}", sys.executable, "-P", "-m", "lmi_core"]
    serve = [*python, "serve", str(checkpoint(shape).absolute()), "--device", "cpu"]
    serve += ["--served-model-name", "model", "--log-level", "warning", "--dtype", "bf16"]
    return [*serve, "--max-batch-size", str(num_streams)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="near-zero")
    add("--streams", type=int, default=_WORK.num_requests)
    add("--tokens", type=int, default=_WORK.num_new, help="of each stream")
    add("--rounds", type=int, default=5)
    add("--beside", type=Path, help="another working copy, built")
    args = parser.parse_args()
    work = Work("streams", "serve", args.streams, _WORK.num_prompt, args.tokens)
    trees = [Path(__file__).parents[1], *([args.beside] if args.beside else [])]
    costs: dict[Path, list[Cost]] = {tree: [] for tree in trees}
    with ExitStack() as stack:
        commands = [command(tree, args.shape, args.streams) for tree in trees]
        servers = [stack.enter_context(started(each)) for each in commands]
        for i in range(-1, args.rounds):
            order = list(zip(trees, servers, strict=True))
            for tree, server in order[:: 1 if i % 2 else -1]:
                cost = measure(server, work, seed=i)
                if i >= 0:  # the first wave warms up
                    costs[tree].append(cost)
    print(f"| us a token | {' | '.join(_COLUMNS)} |")
    print("|---" * (1 + len(_COLUMNS)) + "|")
    for tree, rows in costs.items():
        fields = ("loop", "kernels", "other", "client", "tokens_per_s")
        cells = [f"{statistics.median(getattr(row, name) for row in rows):.1f}" for name in fields]
        print(f"| {tree} | {' | '.join(cells)} |")
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
