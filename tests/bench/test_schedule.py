"""The simulator: the engine's scheduler in virtual time."""

from __future__ import annotations

import pytest

from bench.schedule import INFO, POLICIES, Simulation, Variant, jain, summary
from bench.step_seconds import LLAMA_160M_BF16, Work
from bench.traces import TRACES, Arrival, at_once, backlogged, flood, light

COSTS = LLAMA_160M_BF16


@pytest.mark.parametrize(("num_rows", "num_tokens_per_s"), [(1, 152.4), (8, 1030.0), (32, 1195.0)])
def test_decode_steps_take_what_was_measured(num_rows: int, num_tokens_per_s: float) -> None:
    seconds = COSTS.of([Work(192, 1, True)] * num_rows)
    assert num_rows / seconds == pytest.approx(num_tokens_per_s, rel=0.03)


@pytest.mark.parametrize(("num_tokens", "num_tokens_per_s"), [(512, 2266.0), (2048, 1750.0)])
def test_prompts_take_what_was_measured(num_tokens: int, num_tokens_per_s: float) -> None:
    seconds = COSTS.of([Work(0, num_tokens, True)])
    assert num_tokens / seconds == pytest.approx(num_tokens_per_s, rel=0.03)


@pytest.mark.parametrize("name", TRACES)
def test_all_that_comes_is_served(name: str) -> None:
    trace = TRACES[name](60)
    assert trace == TRACES[name](60)
    run = Simulation(trace, POLICIES["engine"], COSTS)
    served = run.run()
    assert [len(each.tokens_s) for each in served] == [arrival.num_new for arrival in trace]
    assert all(each.first_s > 0 and min(each.gaps_s, default=1.0) > 0 for each in served)
    assert run.scheduler.num_running == run.scheduler.num_waiting == 0


def test_one_request_takes_the_sum_of_its_steps() -> None:
    (served,) = Simulation([Arrival(1.0, 100, 3)], POLICIES["engine"], COSTS).run()
    prompt_s = COSTS.of([Work(0, 100, True)])
    assert served.since_s == 1.0
    assert served.first_s == pytest.approx(prompt_s)
    decode_s = [COSTS.of([Work(start, 1, True)]) for start in (100, 101)]
    # The prompt's step is too long for another to be submitted behind it.
    assert served.gaps_s == pytest.approx([decode_s[0] + COSTS.gap_s, decode_s[1]])


def test_later_turns_find_what_was_said_before() -> None:
    trace = [Arrival(0.0, 256, 32), Arrival(0.5, 16, 4, turn_of=0), Arrival(0.0, 304, 4)]
    first, second, other = Simulation(trace, POLICIES["engine"], COSTS).run()
    assert second.since_s == pytest.approx(first.tokens_s[-1] + 0.5)
    assert second.first_s < 0.2 * other.first_s


def test_chunks_trade_first_tokens_for_gaps() -> None:
    figures = {}
    for name in ("engine", "chunks64", "whole"):
        run = Simulation(at_once(), POLICIES[name], COSTS)
        figures[name] = summary(run.run(), run.now_s)
    assert figures["chunks64"]["gap p99"] < figures["engine"]["gap p99"]
    assert figures["engine"]["first ms"] < figures["chunks64"]["first ms"]
    assert figures["engine"]["first ms"] < 0.9 * figures["whole"]["first ms"]


def test_a_tenant_that_asks_eight_times_as_much_gets_as_much() -> None:
    totals = {}
    for name in ("engine", "arrival"):
        run = Simulation(backlogged(20), POLICIES[name], COSTS)
        tokens: dict[str, int] = {}
        for each in run.run(12.0):
            tenant = each.arrival.tenant
            tokens[tenant] = tokens.get(tenant, 0) + len(each.tokens_s)
        totals[name] = sum(tokens.values()) / run.now_s
        assert (jain(tokens.values()) > 0.95) is (name == "engine")
    assert totals["engine"] > 0.98 * totals["arrival"]


def test_light_tenants_keep_their_tokens_beside_a_flood() -> None:
    calm = light(20.0)
    both = sorted(calm + flood(20.0), key=lambda arrival: arrival.at_s)
    tokens = {}
    for name, trace, policy in (
        ("alone", calm, Variant()),
        ("fair", both, Variant()),
        ("not", both, Variant(is_fair=False)),
    ):
        served = Simulation(trace, policy, COSTS, INFO).run(25.0)
        own = [each for each in served if each.arrival.tenant != "flood"]
        tokens[name] = sum(len(each.tokens_s) for each in own)
    assert tokens["fair"] >= 0.98 * tokens["alone"]
    assert tokens["not"] < 0.5 * tokens["alone"]
