"""What a step would take on 8 to 64 cores: its phases, simulated from chunks measured here.

    python -m bench.many_cores --shape 160m --dtype bf16 --batches 1 32

The engine decodes on one thread while its nodes are cut into chunks as for so many; each node's
number of chunks and their CPU time are measured. The simulated threads draw them from a counter,
add what they did to another, and the last one publishes the next phase, as
``csrc/common/thread_pool.h`` has it. What moving a cache line and reading memory cost there is
assumed (``Machine``), so the result says where a step's time would go, and not how fast a real
machine is.

Shares of a step as it is built: ``work``, the chunks' time over all cores, or reading what they
read at the machine's rate, whichever is longer; ``grain``, what is lost since chunks are too few or
too large; ``sync``, what counters and publishing add. Then microseconds of a step with every design
of ``DESIGNS``.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.family_shapes import ALL_SHAPES, shape_of
from bench.nodes import WEIGHT, config_of
from lmi_core.bench.offline import NUM_PROMPT, OfflineBench, StepLog
from lmi_core.bench.rooflines import ELEMENT_BYTES, RoofShape, kv_bytes
from lmi_core.engine.engine import Engine
from lmi_core.runners.cpu.cpu_runner import CpuRunner, load_cpu_runner
from lmi_core.text.tokenizer import Tokenizer

_NUM_NEW = 16


@dataclass(frozen=True, slots=True)
class Phase:
    """A node of the step graph."""

    name: str
    num_chunks: int
    cpu_s: float
    """Of all chunks, on one core that has the memory for itself."""
    num_bytes: float = 0.0
    """Read from memory."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Assumed: server processors of 8 cores a cache and 32 a NUMA node."""

    num_cores: int
    cores_per_cache: int = 8
    cores_per_node: int = 32
    near_s: float = 40e-9
    """To take a cache line from a core of the same last cache."""
    far_s: float = 110e-9
    """From another cache's."""
    remote_s: float = 220e-9
    """From another node's."""
    read_s: float = 12e-9
    """Between two readers of a line that several want at once."""
    publish_s: float = 0.2e-6
    """To bind a node and count its chunks."""
    node_gb_per_s: float = 200.0
    is_pinned: bool = False
    """Neighbouring threads are on neighbouring cores; else on cores far from each other."""

    def move_s(self, owner: int, taker: int) -> float:
        """From one thread to another."""
        if owner == taker:
            return 0.0
        stride = 1 if self.is_pinned else 11
        owner, core = (thread * stride % self.num_cores for thread in (owner, taker))
        if owner // self.cores_per_node != core // self.cores_per_node:
            return self.remote_s
        is_near = owner // self.cores_per_cache == core // self.cores_per_cache
        return self.near_s if is_near else self.far_s

    @property
    def num_nodes(self) -> int:
        return -(-self.num_cores // self.cores_per_node)


@dataclass(frozen=True, slots=True)
class Design:
    """How a phase is handed out."""

    runs_alone: bool = False
    """A phase of one chunk is run by the thread that found the phase before ended."""
    counter_cores: int | None = None
    """Cores that share a counter, from which others take only what is left; None: all."""
    memory_nodes: int = 1
    """On how many nodes the weights lie."""


DESIGNS = {
    "flat": Design(),
    "alone": Design(runs_alone=True),
    "counters": Design(runs_alone=True, counter_cores=8),
    "nodes": Design(runs_alone=True, counter_cores=8, memory_nodes=8),
}
"""One after the other: one counter and everybody told; phases of one chunk run alone; a counter for
every eight cores, which is what runs; weights on all nodes."""


@dataclass(slots=True)
class _Line:
    """A cache line that cores take from each other, one at a time."""

    machine: Machine
    owner: int
    free_s: float = 0.0

    def take(self, core: int, now_s: float) -> float:
        """When the core has it."""
        self.free_s = max(now_s, self.free_s) + self.machine.move_s(self.owner, core)
        self.owner = core
        return self.free_s


@dataclass(slots=True)
class _Counter:
    cores: range
    num_left: int
    tickets: _Line
    done: _Line
    num_out: int = 0
    """Cores that hold chunks of it, and will say so when there are none left."""


def chunk_seconds(phase: Phase, machine: Machine, design: Design) -> float:
    """Of one chunk beside the others, where the memory that is read may be the limit."""
    alone_s = phase.cpu_s / phase.num_chunks
    active = min(machine.num_cores, phase.num_chunks)
    nodes = min(design.memory_nodes, machine.num_nodes)
    read_s = phase.num_bytes / (machine.node_gb_per_s * 1e9 * nodes)
    return max(alone_s, read_s * active / phase.num_chunks)


def work_seconds(phase: Phase, machine: Machine, design: Design) -> float:
    """If the phase could be cut as one likes, for nothing."""
    nodes = min(design.memory_nodes, machine.num_nodes)
    read_s = phase.num_bytes / (machine.node_gb_per_s * 1e9 * nodes)
    return max(phase.cpu_s / machine.num_cores, read_s)


def grain_seconds(phase: Phase, machine: Machine, design: Design) -> float:
    """Of chunks handed out for nothing."""
    rounds = -(-phase.num_chunks // machine.num_cores)
    return rounds * chunk_seconds(phase, machine, design)


def _counters(phase: Phase, machine: Machine, design: Design, publisher: int) -> list[_Counter]:
    size = min(design.counter_cores or machine.num_cores, machine.num_cores)
    groups = [
        range(first, min(first + size, machine.num_cores))
        for first in range(0, machine.num_cores, size)
    ]
    rounds, rest = divmod(phase.num_chunks, machine.num_cores)
    counters = []
    for cores in groups:
        num_chunks = rounds * len(cores) + min(max(rest - cores.start, 0), len(cores))
        lines = (_Line(machine, publisher), _Line(machine, publisher))
        counters.append(_Counter(cores, num_chunks, *lines))
    return counters


_Ready = tuple[float, int, int, int]
"""When a core is, which one, for which counter, and how many chunks it has run of that."""


def _told(
    counters: Sequence[_Counter], machine: Machine, start_s: float, publisher: int
) -> list[_Ready]:
    """When cores have seen the phase."""
    ready: list[_Ready] = []
    for n, counter in enumerate(counters):
        seen_s = start_s + n * machine.read_s
        for core in counter.cores:
            seen_s += machine.read_s if core != publisher else 0.0
            heapq.heappush(ready, (seen_s + machine.move_s(publisher, core), core, n, 0))
    return ready


def _run_phase(
    phase: Phase, machine: Machine, design: Design, start_s: float, publisher: int
) -> tuple[float, int]:
    """When the phase has ended, and which core found that out."""
    now_s = start_s + machine.publish_s
    chunk_s = chunk_seconds(phase, machine, design)
    if phase.num_chunks == 1 and design.runs_alone:
        return now_s + chunk_s, publisher
    if machine.num_cores > 1:
        now_s += machine.far_s  # the counter is taken from those who look at it
    counters = _counters(phase, machine, design, publisher)
    ready = _told(counters, machine, now_s, publisher)
    all_done = _Line(machine, publisher)
    num_open = sum(counter.num_left > 0 for counter in counters)
    while True:
        now_s, core, n, num_run = heapq.heappop(ready)
        counter = counters[n]
        if counter.num_left > 0:
            counter.num_left -= 1
            counter.num_out += num_run == 0
            drawn_s = counter.tickets.take(core, now_s)
            heapq.heappush(ready, (drawn_s + chunk_s, core, n, num_run + 1))
            continue
        if num_run > 0:
            now_s = counter.done.take(core, now_s)
            counter.num_out -= 1
            if counter.num_out == 0:
                num_open -= 1
                now_s = all_done.take(core, now_s) if len(counters) > 1 else now_s
                if num_open == 0:
                    return now_s, core
        left = [other for other, each in enumerate(counters) if each.num_left > 0]
        if left:
            moved_s = machine.move_s(counters[left[0]].tickets.owner, core)
            heapq.heappush(ready, (now_s + moved_s, core, left[0], 0))


@dataclass(frozen=True, slots=True)
class StepShare:
    """Seconds of a step, and what of them each cause has."""

    total_s: float
    work_s: float
    grain_s: float

    @property
    def sync_s(self) -> float:
        return self.total_s - self.work_s - self.grain_s


def simulate(phases: Sequence[Phase], machine: Machine, design: Design) -> StepShare:
    now_s, publisher, work_s, grained_s = 0.0, 0, 0.0, 0.0
    for phase in phases:
        now_s, publisher = _run_phase(phase, machine, design, now_s, publisher)
        work_s += work_seconds(phase, machine, design)
        grained_s += grain_seconds(phase, machine, design)
    return StepShare(now_s, work_s, grained_s - work_s)


def phases_of(runner: CpuRunner, shape: RoofShape, batch: int, context: float) -> Iterator[Phase]:
    """Of what was measured last."""
    for text, (num_steps, _, cpu_ns, num_chunks) in zip(
        runner.graph.describe(), runner.graph.node_times(), strict=True
    ):
        if num_chunks == 0:
            continue
        weight = WEIGHT.search(text)
        num_bytes = 0.0
        if weight is not None:
            num_bytes = ELEMENT_BYTES[weight[1]] * int(weight[2]) * int(weight[3])
        elif text.startswith("attention"):
            num_bytes = kv_bytes("bf16") * shape.kv_columns * batch * context
        chunks = round(num_chunks / num_steps)
        yield Phase(text.split()[0], max(1, chunks), cpu_ns / num_steps * 1e-9, num_bytes)


def describe(machine: Machine, phases: Sequence[Phase]) -> str:
    built = simulate(phases, machine, DESIGNS["counters"])
    shares = [built.work_s, built.grain_s, built.sync_s]
    parts = " | ".join(f"{100 * share / built.total_s:.0f} %" for share in shares)
    totals = [simulate(phases, machine, each).total_s for each in DESIGNS.values()]
    times = " | ".join(f"{total_s * 1e6:.0f}" for total_s in totals)
    return f"{machine.num_cores} | {parts} | {times} |"


async def run(arguments: argparse.Namespace) -> None:
    shape = shape_of(arguments.shape)
    config = replace(
        config_of(arguments.shape, arguments.dtype, max(arguments.batches), 1),
        enable_prefix_caching=True,
    )
    runner, model = load_cpu_runner(config)
    tokenizer = Tokenizer.load(config.model, vocab_size=runner.info.vocab_size)
    print("| model | batch | cores | work | grain | sync | " + " | ".join(DESIGNS) + " |")
    async with Engine(config, runner=runner, tokenizer=tokenizer) as engine:
        bench = OfflineBench(shape, arguments.dtype, engine, StepLog())
        for batch in arguments.batches:
            for num_cores in (0, *arguments.cores):  # first, the prompts are put into the cache
                runner.graph.measure_nodes(batch if num_cores else 0, num_cores)
                prompts = (bench.generate(NUM_PROMPT, _NUM_NEW, seed) for seed in range(batch))
                await asyncio.gather(*prompts)
                if num_cores:
                    phases = list(phases_of(runner, shape, batch, NUM_PROMPT + _NUM_NEW / 2))
                    line = describe(Machine(num_cores), phases)
                    print(f"| {arguments.shape} {arguments.dtype} | {batch} | {line}", flush=True)
    del model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=ALL_SHAPES, default="160m")
    parser.add_argument("--dtype", choices=sorted(ELEMENT_BYTES), default="bf16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--cores", type=int, nargs="+", default=[8, 16, 32, 64])
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
