"""The engine's scheduler in virtual time: what policies do to thousands of requests, in seconds.

    python -m bench.schedule                        # four traces, every policy
    python -m bench.schedule --trace "long tails" --requests 5000 --policy chunks64
    python -m bench.schedule --fairness             # one tenant floods, others don't

Scheduler, policy, block pool and prefix index are the engine's own, and the loop's order of plans,
steps ahead and commits is kept; what a step takes comes from ``bench/step_seconds.py``. What the
server adds isn't there. ``first ms`` (mean, and its percentiles) and ``gap`` are milliseconds to
the first token and between two; ``good/s``: requests a second whose first token came within a
second and whose mean time per token is at most 60 ms.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from bench.step_seconds import LLAMA_160M_BF16, StepSeconds, Work
from bench.traces import TRACES, Arrival, Trace, at_once, backlogged, flood, light
from lmi_core import _native
from lmi_core.bench.figures import percentile
from lmi_core.engine.kv_memory import KvMemory
from lmi_core.engine.loop import LEAD_PART, LEAD_S, MAX_AHEAD_S
from lmi_core.engine.paged_policy import PagedPolicy
from lmi_core.engine.plan import Plan
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.engine.scheduler import Scheduler
from lmi_core.engine.sequence import ActiveRequest
from lmi_core.engine.sequence import Sequence as Choice
from lmi_core.engine.step_filling import fill
from lmi_core.engine.stream import EventStream
from lmi_core.runners.runner import RunnerInfo

_FIRST_TOKEN_S, _PER_TOKEN_S = 1.0, 0.06
_VOCAB_SIZE = 32000
INFO = RunnerInfo(
    vocab_size=_VOCAB_SIZE,
    max_model_len=4096,
    max_num_seqs=32,
    max_num_batched_tokens=2048,
    max_logit_rows=256,
    max_logprobs=0,
    num_blocks=4096,
    block_size=32,
    num_saturating_tokens=128,
    runs_ahead=True,
)
"""As the CPU engine has it for 32 sequences."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What a policy is told otherwise than the engine tells it."""

    num_saturating_tokens: int | None = INFO.num_saturating_tokens
    waiting_steps: int = 0
    is_fair: bool = True


POLICIES = {
    "engine": Variant(),
    "chunks64": Variant(num_saturating_tokens=64),
    "whole": Variant(num_saturating_tokens=None),
    "wait8": Variant(waiting_steps=8),
    "arrival": Variant(is_fair=False),
}
"""The engine's own; with fewer rows beside prompts; with as much of the prompts as a step has room
for; with eight steps between admissions; without tenants' shares, where there are several."""


@dataclass(slots=True)
class Served:
    """When a request's tokens were there."""

    arrival: Arrival
    since_s: float
    """When it came."""
    tokens_s: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.tokens_s[0] - self.since_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.tokens_s)]

    @property
    def is_good(self) -> bool:
        first, last = self.tokens_s[0], self.tokens_s[-1]
        per_token_s = (last - first) / max(1, len(self.tokens_s) - 1)
        return self.first_s <= _FIRST_TOKEN_S and per_token_s <= _PER_TOKEN_S


class _Memory:
    """What ``KvMemory`` wants of a runner: the native tables, and no model."""

    def __init__(self, info: RunnerInfo) -> None:
        self.info = info
        self.pool = _native.BlockPool(info.num_blocks, info.block_size, bytes(16))
        num_blocks = -(-info.max_model_len // info.block_size)
        self.block_tables = _native.BlockTables(info.max_num_seqs, num_blocks)
        self.sampling = _native.SamplingTable(info.max_num_seqs, info.vocab_size)

    def step(self) -> _native.Step:
        return _native.Step(
            max_tokens=self.info.max_num_batched_tokens,
            max_seqs=self.info.max_num_seqs,
            max_logit_rows=self.info.max_logit_rows,
            max_logprobs=0,
            max_copies=self.info.max_num_seqs,
            block_size=self.info.block_size,
            block_tables=self.block_tables,
            sampling=self.sampling,
        )


class _Submitted(NamedTuple):
    plan: Plan
    seconds: float


class Simulation:
    """The engine's overlapped loop, with arrivals, steps and tokens at virtual times."""

    def __init__(
        self, trace: Trace, variant: Variant, costs: StepSeconds, info: RunnerInfo = INFO
    ) -> None:
        self._costs = costs
        self._info = replace(info, num_saturating_tokens=variant.num_saturating_tokens)
        self._native = _Memory(self._info)
        runner = cast(Any, self._native)
        self._memory = KvMemory(runner, enable_prefix_caching=True, guaranteed_no_evict=False)
        policy = PagedPolicy(
            self._info,
            self._memory,
            guaranteed_no_evict=False,
            waiting_steps=variant.waiting_steps,
        )
        self.scheduler = Scheduler(self._memory, policy)
        self._steps = itertools.cycle([self._native.step() for _ in range(3)])
        self._trace = trace
        self._is_fair = variant.is_fair
        self._rng = random.Random(0)
        self._spread = random.Random(1)
        self._later: dict[int, list[int]] = {}
        self._to_come: list[tuple[float, int]] = []
        for i, arrival in enumerate(trace):
            if arrival.turn_of is None:
                heapq.heappush(self._to_come, (arrival.at_s, i))
            else:
                self._later.setdefault(arrival.turn_of, []).append(i)
        self._open: dict[ActiveRequest, tuple[int, Served]] = {}
        self._texts: dict[int, list[int]] = {}
        self._num_come = 0
        self.served: list[Served | None] = [None] * len(trace)
        self.now_s = 0.0
        self.num_steps = 0

    def run(self, until_s: float = float("inf")) -> list[Served]:
        """Those that came until then, as far as they got."""
        submitted: _Submitted | None = None
        while self.now_s < until_s:
            self._arrive(self.now_s)
            if submitted is None:
                submitted = self._submit()
            if submitted is None:
                if not self._to_come:
                    break
                self.now_s = max(self.now_s, self._to_come[0][0])
                continue
            following = self._submit_ahead(submitted)
            self.now_s += submitted.seconds
            self._commit(submitted)
            submitted = following
            if submitted is None:
                self.now_s += self._costs.gap_s
        return [served for served in self.served if served is not None]

    def _arrive(self, until_s: float) -> None:
        while self._to_come and self._to_come[0][0] <= until_s:
            at_s, i = heapq.heappop(self._to_come)
            arrival = self._trace[i]
            before = [] if arrival.turn_of is None else self._texts.pop(arrival.turn_of)
            own = [self._rng.randrange(_VOCAB_SIZE) for _ in range(arrival.num_prompt)]
            self._add(
                i, arrival, (before + own)[: self._info.max_model_len - arrival.num_new], at_s
            )

    def _add(self, i: int, arrival: Arrival, prompt: list[int], at_s: float) -> None:
        request = GenerationRequest(
            request_id=str(i),
            params=SamplingParams(max_new_tokens=arrival.num_new),
            priority=arrival.priority,
            tenant=arrival.tenant if self._is_fair else "",
        )
        active = ActiveRequest(
            request, prompt, seed=i, arrival_s=at_s, stream=EventStream(lambda: None)
        )
        active.sequences = [
            Choice(
                active,
                0,
                key=(arrival.priority, self._num_come, 0),
                max_len=len(prompt) + arrival.num_new,
                end_ids=frozenset(),
                hashes=self._memory.hash_prompt(prompt, active.prefix_seed),
                detokenizer=cast(Any, None),
                stop_matcher=None,
            )
        ]
        self._num_come += 1
        served = self.served[i] = Served(arrival, at_s)
        self._open[active] = (i, served)
        self.scheduler.add(active.sequences)

    def _submit(self) -> _Submitted | None:
        plan = self.scheduler.plan(self.now_s)
        if not plan.sequences:
            return None
        step = next(self._steps)
        fill(plan, step)
        return _Submitted(plan, self._seconds(list(_works(plan))))

    def _submit_ahead(self, submitted: _Submitted) -> _Submitted | None:
        if not self._info.runs_ahead or submitted.seconds > MAX_AHEAD_S:
            return None
        due_s = self.now_s + max(0.0, (1.0 - LEAD_PART) * submitted.seconds - LEAD_S)
        self._arrive(due_s)
        ahead = self.scheduler.ahead
        plan = ahead.plan(submitted.plan, due_s)
        if plan is None:
            return None
        step = next(self._steps)
        ahead.fill(plan, step)
        return _Submitted(plan, self._seconds(list(_works(plan))))

    def _seconds(self, works: list[Work]) -> float:
        return self._costs.of(works) * self._spread.choice(self._costs.spread)

    def _commit(self, submitted: _Submitted) -> None:
        plan, step = submitted.plan, submitted.plan.step
        self.num_steps += 1
        for row in range(step.num_logit_rows):
            step.set_result(row, self._rng.randrange(_VOCAB_SIZE), 0.0)
        self.scheduler.commit(plan)
        for output in plan.outputs:
            request = output.sequence.request
            i, served = self._open[request]
            served.tokens_s.append(self.now_s)
            if output.finish_reason is None:
                continue
            del self._open[request]
            for turn in self._later.get(i, ()):
                self._texts[i] = output.sequence.token_ids.tolist()
                heapq.heappush(self._to_come, (self.now_s + self._trace[turn].at_s, turn))


def _works(plan: Plan) -> Iterable[Work]:
    for sequence in plan.sequences:
        start, count = sequence.chunk
        yield Work(start, count, start + count >= len(sequence.token_ids))


def summary(served: Sequence[Served], seconds: float) -> dict[str, float]:
    """Milliseconds and rates of requests that got at least a token."""
    begun = [each for each in served if each.tokens_s]
    firsts = [1e3 * each.first_s for each in begun]
    gaps = [1e3 * gap for each in begun for gap in each.gaps_s]
    return {
        "first ms": sum(firsts) / max(1, len(firsts)),
        "p50": percentile(firsts, 0.5),
        "p99": percentile(firsts, 0.99),
        "gap p50": percentile(gaps, 0.5),
        "gap p90": percentile(gaps, 0.9),
        "gap p99": percentile(gaps, 0.99),
        "tokens/s": sum(len(each.tokens_s) for each in begun) / seconds,
        "good/s": sum(each.is_good for each in begun) / seconds,
    }


def jain(values: Iterable[float]) -> float:
    """1 where all shares are equal, 1 / n where one has everything (Jain et al., 1984)."""
    shares = list(values)
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


def show(name: str, policy: str, figures: dict[str, float]) -> None:
    print(f"{name:15}{policy:10}", *(f"{value:9.1f}" for value in figures.values()), flush=True)


def show_traces(names: Sequence[str], policies: Sequence[str], num_requests: int) -> None:
    traces = {**TRACES, "at once": lambda num: at_once()}
    heading = summary([], 1.0)
    print(" " * 24, *(f"{title:>9}" for title in heading))
    for name in names:
        for policy in policies:
            run = Simulation(traces[name](num_requests), POLICIES[policy], LLAMA_160M_BF16)
            show(name, policy, summary(run.run(), run.now_s))


def show_fairness(seconds: float, num_draws: int) -> None:
    """Eight tenants who want more than there is, and seven light ones with and without a flood, in
    so many draws of arrivals together."""
    for policy in ("engine", "arrival"):
        run = Simulation(backlogged(), POLICIES[policy], LLAMA_160M_BF16)
        tokens: Counter[str] = Counter()
        for each in run.run(25.0):
            tokens[each.arrival.tenant] += len(each.tokens_s)
        index, rate = jain(tokens.values()), tokens.total() / run.now_s
        print(f"backlogged     {policy:10} Jain's index {index:.3f}, {rate:.0f} tokens/s")
    print(" " * 24, *(f"{title:>9}" for title in summary([], 1.0)))
    for name, policy in (
        ("light alone", "engine"),
        ("beside a flood", "engine"),
        ("beside a flood", "arrival"),
    ):
        served: list[Served] = []
        for draw in range(num_draws):
            trace = light(seconds, seed=2 * draw)
            if name != "light alone":
                trace = trace + flood(seconds, seed=2 * draw + 1)
            trace.sort(key=lambda arrival: arrival.at_s)
            served += Simulation(trace, POLICIES[policy], LLAMA_160M_BF16).run(seconds)
        for tenant in ("t", "flood") if name != "light alone" else ("t",):
            own = [each for each in served if each.arrival.tenant.startswith(tenant)]
            figures = summary(own, seconds * num_draws)
            show("  the flood" if tenant == "flood" else name, policy, figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", nargs="*", choices=(*TRACES, "at once"))
    parser.add_argument("--policy", nargs="*", choices=tuple(POLICIES))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--fairness", action="store_true", help="tenants instead of traces")
    parser.add_argument("--seconds", type=float, default=300.0, help="of the flood")
    parser.add_argument("--draws", type=int, default=1, help="of the flood's arrivals")
    options = parser.parse_args()
    if options.fairness:
        show_fairness(options.seconds, options.draws)
    else:
        names, policies = (
            options.trace or (*TRACES, "at once"),
            options.policy or tuple(POLICIES)[:4],
        )
        show_traces(names, policies, options.requests)


if __name__ == "__main__":
    main()
