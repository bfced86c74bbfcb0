"""The comparison with other engines, with a fake one as the peer."""

from __future__ import annotations

import dataclasses
import json
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoints import SHAPES, write_tokenizer
from bench.peers.driver import Load
from bench.peers.install import Home, InstallError, install
from bench.peers.llama_cpp import bench_figure
from bench.peers.pairs import Pace, measure_pairs
from bench.peers.plot import svg
from bench.peers.process import SideError
from bench.peers.row import NUM_PAIRS, Pair, Row, load_row, load_rows, quartiles, resume
from bench.peers.session import Session
from bench.peers.side import Side
from bench.peers.table import HEADINGS, markdown
from bench.peers.work import WORKS, Figure, Timing, Work, figure_of, make_prompts, text_of
from lmi_core.bench.roofs import Roofs
from tests.bench.fake_peer import FakePeer, server, side, write_model

ROOFS = Roofs(1, 40.0, 900.0, 450.0, 1800.0)
MACHINE = {"cpu": "test", "num_threads": 1}
QUICK = Pace(settle_s=0.0)


class InstantSide:
    """Notes who was asked, and answers from a list of rates."""

    def __init__(self, name: str, calls: list[tuple[str, int]], rates: list[float]) -> None:
        self.about: dict[str, Any] = {"over": "driver"}
        self.name, self.calls, self.rates = name, calls, rates

    def start(self) -> None:
        """Nothing to start."""

    def measure(self, work: Work, seed: int) -> Figure:
        self.calls.append((self.name, seed))
        if not self.rates:
            raise SideError(f"{self.name} ran out")
        return Figure(self.rates.pop(0), 10.0, 1.0)

    def stop(self) -> None:
        """Nothing to stop."""


class FakeOurs:
    """Our sides, fake too: the model directory is the checkpoint."""

    def __init__(self) -> None:
        self.asked_completions: list[bool] = []

    def engine_side(self, load: Load) -> Side:
        return side(load.model)

    def server_side(self, load: Load, *, asks_completions: bool) -> Side:
        self.asked_completions.append(asks_completions)
        return server(load.model)


def make_row(what: str = "decode1", **values: Any) -> Row:
    defaults = {"peer": "fake", "peer_version": "fake==1", "peer_format": "fake-bf16"}
    keys = {"shape": "160m", "dtype": "bf16", "what": what, "commit": "abc", "machine": MACHINE}
    return Row(**(defaults | keys | values))


def pair(ours: float, theirs: float) -> Pair:
    return Pair(
        "2026-01-02T03:04:05+00:00", Figure(ours, 1.0, 2.0), Figure(theirs, 2.0, 1.0), ROOFS
    )


def make_session(tmp_path: Path, **values: Any) -> Session:
    checkpoint = write_model(tmp_path / "ours", token_s=0.005)
    defaults: dict[str, Any] = {
        "ours": FakeOurs(),
        "checkpoint": lambda shape: checkpoint,
        "probe": lambda: ROOFS,
        "results": tmp_path / "results",
        "commit": "abc",
        "machine": MACHINE,
        "num_threads": 1,
        "pace": QUICK,
        "say": lambda line: None,
    }
    return Session(**(defaults | values))


def test_figures() -> None:
    prefill = figure_of(WORKS["prefill512"], [Timing(0.5, 0.5, 1)])
    assert prefill == Figure(1024.0, 500.0, None)
    decode = figure_of(WORKS["decode1"], [Timing(1.0, 1.0 + 127 * 0.01, 128)])
    assert decode.tokens_per_s == pytest.approx(100.0)
    assert decode.per_token_ms == pytest.approx(10.0)
    timings = [Timing(1.0, 4.0, 128)] * 7 + [Timing(2.0, 8.0, 128)]
    serve = figure_of(WORKS["serve8"], timings)
    assert serve.tokens_per_s == 8 * 128 / 8.0
    assert serve.first_token_ms == pytest.approx(1125.0)


def test_wrong_number_of_tokens_is_no_figure() -> None:
    with pytest.raises(ValueError, match=r"decode1 wants 1 x 128 tokens, got \[127\]"):
        figure_of(WORKS["decode1"], [Timing(1.0, 2.0, 127)])


def test_prompts_are_as_long_in_text_as_in_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path, 400)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompts = make_prompts(WORKS["serve8"], seed=1)
    assert [len(prompt) for prompt in prompts] == [128] * 8
    assert [tokenizer.encode(text_of(prompt)).ids for prompt in prompts] == prompts
    assert make_prompts(WORKS["serve8"], seed=1) == prompts
    assert make_prompts(WORKS["serve8"], seed=2) != prompts


def test_prompts_that_share_a_prefix() -> None:
    prompts = make_prompts(WORKS["prefix8"], seed=1)
    assert [len(prompt) for prompt in prompts] == [1056] * 8
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 8
    assert prompts[0][:1024] != make_prompts(WORKS["prefix8"], seed=2)[0][:1024]


def test_llama_bench_reports_a_rate() -> None:
    assert bench_figure(WORKS["prefill512"], 1024.0) == Figure(1024.0, 500.0, None)
    assert bench_figure(WORKS["decode1"], 100.0) == Figure(100.0, None, 10.0)


def test_sides_take_turns(tmp_path: Path) -> None:
    calls: list[tuple[str, int]] = []
    row = make_row()
    rates = [float(i) for i in range(1, 9)]
    probes = []
    saved = []

    def probe() -> Roofs:
        probes.append(len(calls))
        return ROOFS

    ours, theirs = (InstantSide(name, calls, list(rates)) for name in ("ours", "theirs"))
    measure_pairs(row, ours, theirs, probe, lambda row: saved.append(len(row.pairs)), QUICK)
    assert calls[:2] == [("ours", 0), ("theirs", 0)]  # warming up
    assert calls[2:6] == [("ours", 1), ("theirs", 1), ("theirs", 2), ("ours", 2)]
    assert probes == [3, 5, 7, 9, 11, 13, 15]  # between the two of each pair
    assert saved == [1, 2, 3, 4, 5, 6, 7]
    assert row.is_done
    assert row.ratio.median == 1.0


def test_time_ends_a_row_and_a_failure_too(tmp_path: Path) -> None:
    row = make_row()
    calls: list[tuple[str, int]] = []
    past = Pace(settle_s=0.0, deadline=time.monotonic() - 1)
    side_a, side_b = (InstantSide(name, calls, [1.0] * 9) for name in ("ours", "theirs"))
    measure_pairs(row, side_a, side_b, lambda: ROOFS, lambda row: None, past)
    assert (row.pairs, row.error) == ([], "")
    side_b.rates = [1.0] * 3
    measure_pairs(row, side_a, side_b, lambda: ROOFS, lambda row: None, QUICK)
    assert (len(row.pairs), row.error) == (2, "theirs ran out")


def test_quartiles() -> None:
    assert dataclasses.astuple(quartiles([3.0, 1.0, 2.0, 5.0, 4.0])) == (2.0, 3.0, 4.0)
    assert dataclasses.astuple(quartiles([2.0])) == (2.0, 2.0, 2.0)


def test_value_is_the_median_of_the_pairs_ratios() -> None:
    row = make_row(pairs=[pair(10.0, 1.0), pair(2.0, 1.0), pair(30.0, 10.0)])
    assert row.ratio.median == 3.0  # the ratio of the medians would be 10
    assert row.first_token_ratio == 0.5
    assert row.per_token_ratio == 2.0


def test_shares_of_the_roof() -> None:
    shape = SHAPES["160m"]
    rate = ROOFS.read_gb_per_s * 1e9 / (2 * (shape.linear_params + 192 * 2 * 12 * 768))
    row = make_row(pairs=[pair(rate / 2, rate / 4)])
    ours, theirs = row.shares("ours"), row.shares("theirs")
    assert ours is not None
    assert theirs is not None
    assert (ours.median, theirs.median) == (pytest.approx(0.5), pytest.approx(0.25))
    assert make_row(dtype="fp16", pairs=[pair(1.0, 1.0)]).shares("ours") is None
    rates = [make_row(dtype=dtype).roof_tokens_per_s(ROOFS) for dtype in ("bf16", "int8", "int4")]
    assert 1.8 < rates[1] / rates[0] < 2.0
    assert 1.3 < rates[2] / rates[1] < 1.9
    one, many = (make_row(what).roof_tokens_per_s(ROOFS) for what in ("decode1", "serve32"))
    assert one < many < 32 * one


def test_rows_survive_their_file(tmp_path: Path) -> None:
    row = make_row(pairs=[pair(2.0, 1.0), pair(1.0, 1.0)], theirs_about={"over": "http"})
    row.save(tmp_path)
    path = tmp_path / "160m-bf16-decode1-fake.json"
    assert load_row(path) == row
    assert json.loads(path.read_text())["summary"]["ratio"]["median"] == 1.5
    assert load_rows(tmp_path) == [row]


def test_a_row_goes_on_only_for_the_same_code_and_machine(tmp_path: Path) -> None:
    make_row(pairs=[pair(2.0, 1.0)], error="killed").save(tmp_path)
    resumed = resume(make_row(), tmp_path)
    assert (len(resumed.pairs), resumed.error) == (1, "")
    for change in ({"commit": "def"}, {"machine": {}}, {"peer_version": "fake==2"}):
        assert resume(make_row(**change), tmp_path).pairs == []


def test_session_measures_both_ways(tmp_path: Path) -> None:
    peer = FakePeer(tmp_path / "homes", token_s=0.01)
    session = make_session(tmp_path)
    rows = session.run(peer, "160m", "bf16", ["decode1", "prefill512", "serve8"])
    assert [row.error for row in rows] == ["", "", ""]
    assert [len(row.pairs) for row in rows] == [NUM_PAIRS] * 3
    assert [row.ratio.median for row in rows[:2]] == pytest.approx([2.0, 2.0])
    assert [row.theirs_about["over"] for row in rows] == ["driver", "driver", "http"]
    assert peer.num_conversions == 1
    before = (session.results / "160m-bf16-decode1-fake.json").stat().st_mtime_ns
    session.run(peer, "160m", "bf16", ["decode1"])  # done: not run again
    assert (session.results / "160m-bf16-decode1-fake.json").stat().st_mtime_ns == before


def test_only_the_row_of_server_cost_asks_ours_as_it_asks_the_peer(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    peer = FakePeer(tmp_path / "homes")
    rows = session.run(peer, "near-zero", "bf16", ["serve8", "serve32", "serve64"])
    assert [(row.error, len(row.pairs)) for row in rows] == [("", NUM_PAIRS)] * 3
    assert session.ours.asked_completions == [False, True]  # type: ignore[attr-defined]
    assert [row.theirs_about["over"] for row in rows] == ["http"] * 3
    assert "near-zero | bf16 | serve64" in markdown(load_rows(session.results))


def test_interrupted_session_goes_on(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    (row,) = session.run(FakePeer(tmp_path / "a", dies_at=4), "160m", "bf16", ["decode1"])
    assert len(row.pairs) == 2
    assert "exited with 9" in row.error
    (row,) = session.run(FakePeer(tmp_path / "b"), "160m", "bf16", ["decode1"])
    assert (len(row.pairs), row.error) == (NUM_PAIRS, "")


def test_a_side_that_died_is_started_again_for_the_next_row(tmp_path: Path) -> None:
    whats = ["prefill512", "decode1"]
    rows = make_session(tmp_path).run(FakePeer(tmp_path, dies_at=4), "160m", "bf16", whats)
    assert [len(row.pairs) for row in rows] == [2, 2]
    assert all("exited with 9" in row.error for row in rows)


def test_peer_without_a_server_takes_the_requests_at_once(tmp_path: Path) -> None:
    peer = FakePeer(tmp_path / "homes", serves=False)
    (row,) = make_session(tmp_path).run(peer, "160m", "bf16", ["serve8"])
    assert (row.ours_about["over"], row.theirs_about["over"]) == ("http", "driver")
    assert "fake (offline)" in markdown([row])


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [({"convert_error": "no converter"}, "no converter"), ({"no_start": True}, "no such model")],
)
def test_peer_that_does_not_come_up_fails_its_rows(
    tmp_path: Path, behaviour: dict[str, Any], message: str
) -> None:
    session = make_session(tmp_path)
    rows = session.run(FakePeer(tmp_path, **behaviour), "160m", "bf16", ["decode1", "prefill512"])
    assert all(message in row.error and not row.pairs for row in rows)
    assert load_rows(session.results) == []


def test_installation_is_remembered(tmp_path: Path) -> None:
    peer = FakePeer(tmp_path)
    assert not peer.is_installed
    assert peer.install().error == ""
    assert peer.is_installed
    peer.install()
    assert peer.num_installs == 1
    peer.requirements = ("fake==2",)
    assert not peer.is_installed
    peer.install()
    assert peer.num_installs == 2


def test_failed_installation_is_reported_and_tried_again_when_asked(tmp_path: Path) -> None:
    peer = FakePeer(tmp_path, install="raise SystemExit(3)")
    assert "exit status 3" in peer.install().error
    assert not peer.is_installed
    peer.behaviour = {}
    assert peer.install().error
    assert peer.num_installs == 1
    assert peer.install(retry=True).error == ""


def test_installation_has_a_limit(tmp_path: Path) -> None:
    def steps(home: Home) -> None:
        home.run("sleep", "30")

    start = time.monotonic()
    result = install(tmp_path, "slow", steps, limit_s=0.2)
    assert "out of time in: sleep" in result.error
    assert time.monotonic() - start < 10
    with pytest.raises(InstallError, match=r"install\.log"):
        Home(tmp_path).run("false")


def test_table_can_be_pasted() -> None:
    rows = [
        make_row(pairs=[pair(2.0, 1.0), pair(3.0, 1.0)]),
        make_row("serve8", pairs=[pair(2.0, 1.0), pair(0.5, 1.0)]),
        make_row("serve32"),
    ]
    lines = markdown(rows).splitlines()
    assert lines[0].split(" | ")[1:-1] == list(HEADINGS[1:-1])
    assert "2.50 (2.25-2.75) |" in lines[2]
    assert "within noise" in lines[3]
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert lines[4] == ""


def test_plot_is_a_picture() -> None:
    rows = [make_row(pairs=[pair(2.0, 1.0)]), make_row("serve8", pairs=[pair(1.0, 3.0)])]
    root = xml.etree.ElementTree.fromstring(svg(rows))
    circles = [element for element in root if element.tag.endswith("circle")]
    ahead, behind = (float(circle.get("cx", "nan")) for circle in circles)
    assert ahead > behind
    assert xml.etree.ElementTree.fromstring(svg([])) is not None
