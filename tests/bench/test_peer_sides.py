"""The processes that are measured: drivers, servers and our own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.checkpoints import SHAPES, make_checkpoint
from bench.peers import ours as real_ours
from bench.peers import side as bench_side
from bench.peers.driver import Load, arguments_of, parse_load
from bench.peers.process import SideError
from bench.peers.side import Side
from bench.peers.work import WORKS, Timing, Work
from tests.bench.fake_peer import server, side, write_model


@pytest.fixture
def started() -> Iterator[list[Side]]:
    sides: list[Side] = []
    yield sides
    for one in sides:
        one.stop()


def test_load_survives_the_command_line() -> None:
    load = Load(Path("a b"), "bf16", 3, 5)
    assert parse_load(arguments_of(load)) == load


def test_driver(tmp_path: Path, started: list[Side]) -> None:
    driver = side(write_model(tmp_path / "model"))
    started.append(driver)
    driver.start()
    assert driver.about == {"over": "driver", "version": "1", "prompt": "any"}
    assert driver.measure(WORKS["decode1"], 1).tokens_per_s == pytest.approx(100.0)
    assert driver.measure(WORKS["prefill512"], 1).tokens_per_s == pytest.approx(100.0)
    assert "noise on standard output" in (tmp_path / "model/engine.log").read_text()


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ({"error": "no kernel"}, "ValueError: no kernel"),
        ({"short": 1}, "wants 1 x 128 tokens"),
        ({"dies_at": 1}, "exited with 9.*out of memory"),
    ],
)
def test_driver_fails(
    tmp_path: Path, started: list[Side], behaviour: dict[str, Any], message: str
) -> None:
    driver = side(write_model(tmp_path / "model", **behaviour))
    started.append(driver)
    driver.start()
    with pytest.raises(SideError, match=message):
        driver.measure(WORKS["decode1"], 1)


def test_driver_does_not_start(tmp_path: Path, started: list[Side]) -> None:
    driver = side(write_model(tmp_path / "model", no_start=True))
    started.append(driver)
    with pytest.raises(SideError, match="no such model"):
        driver.start()


def test_server(tmp_path: Path, started: list[Side]) -> None:
    served = server(write_model(tmp_path / "model"))
    started.append(served)
    served.start()
    figure = served.measure(WORKS["serve8"], 1)
    assert figure.tokens_per_s > 0
    assert figure.first_token_ms is not None
    assert figure.first_token_ms > 0


def test_a_shared_prefix_is_asked_for_first(
    tmp_path: Path, started: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: Any = server(write_model(tmp_path / "model"))
    started.append(served)
    served.start()
    waves = []

    async def wave(port: int, api: Any, texts: list[str], num_new: int, timeout_s: float) -> Any:
        waves.append(([len(text) for text in texts], num_new))
        return [Timing(0.1, 1.1, num_new)] * len(texts)

    monkeypatch.setattr(bench_side, "wave", wave)
    assert served.measure(WORKS["prefix8"], 1).first_token_ms == pytest.approx(100)
    assert waves == [([1024], 1), ([1056] * 8, 32)]


@pytest.mark.parametrize(
    ("behaviour", "message"), [({"short": 1}, "8 x 128"), ({"status": 503}, "503")]
)
def test_server_fails(
    tmp_path: Path, started: list[Side], behaviour: dict[str, Any], message: str
) -> None:
    served = server(write_model(tmp_path / "model", **behaviour))
    started.append(served)
    served.start()
    with pytest.raises(SideError, match=message):
        served.measure(WORKS["serve8"], 1)


def test_nothing_is_left_running(tmp_path: Path) -> None:
    driver: Any = side(write_model(tmp_path / "model"))
    driver.start()
    process_id = driver._process._process.pid
    driver.stop()
    driver.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


@pytest.mark.parametrize(
    ("make_side", "work"),
    [(real_ours.engine_side, "decode1"), (real_ours.server_side, "serve8")],
)
def test_ours(tmp_path: Path, started: list[Side], make_side: Any, work: str) -> None:
    checkpoint = make_checkpoint(SHAPES["near-zero"], tmp_path / "model")
    ours: Side = make_side(Load(checkpoint, "bf16", 1, 8))
    started.append(ours)
    ours.start()
    figure = ours.measure(WORKS[work], 1)
    assert figure.tokens_per_s > 0
    assert figure.per_token_ms is not None


def test_ours_asked_for_completions(tmp_path: Path, started: list[Side]) -> None:
    checkpoint = make_checkpoint(SHAPES["near-zero"], tmp_path / "model")
    ours = real_ours.server_side(Load(checkpoint, "bf16", 1, 8), asks_completions=True)
    started.append(ours)
    ours.start()
    figure = ours.measure(Work("small", "serve", 8, 16, 8, asks_completions=True), 1)
    assert figure.tokens_per_s > 0
