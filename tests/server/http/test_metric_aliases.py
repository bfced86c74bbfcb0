"""Metrics of requests, their names in other systems, and the board that asks for them."""

from __future__ import annotations

import asyncio
import json
import platform
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.stats import RequestRecord
from lmi_server.http.board import PANELS, board_text
from lmi_server.http.metric_aliases import ALIASES
from lmi_server.http.metrics import Metrics
from tests.cli.test_native import post, serving

BOARD = Path(__file__).parents[3] / "server" / "deploy" / "grafana.json"


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def scraped() -> Iterator[str]:
    with serving("--metric-aliases", "vllm,tgi,djl", "--served-model-name", "m") as url:
        body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 5}}
        assert post(f"{url}/invocations", body)[0] == 200
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
            yield response.read().decode()


def test_a_server_has_the_names_asked_for(scraped: str) -> None:
    """``metric_aliases``; each family has the values of ours."""
    found = samples(scraped)
    label = (("model_name", "m"),)
    for system, names in ALIASES.items():
        for theirs, ours in names.items():
            if system == "djl":
                continue
            for ending in ("", "_total", "_count", "_sum"):
                if (ours + ending, label) in found:
                    assert found[theirs + ending, label] == found[ours + ending, label]
            assert any(name.startswith(theirs) for name, _ in found), theirs
    assert found["vllm:generation_tokens_total", label] == 5
    assert found["vllm:e2e_request_latency_seconds_count", label] == 1
    finished = (("finished_reason", "length"), *label)
    assert found["vllm:request_success_total", finished] == 1


def test_djls_names_have_its_units_and_labels(scraped: str) -> None:
    found = samples(scraped)
    ours, theirs = (("model_name", "m"),), (("Model", "m"),)
    for name, own in (("QueueTime", "lmi_request_queue"), ("RequestLatency", "lmi_request")):
        seconds = found[f"{own}_seconds_sum", ours]
        assert found[f"{name}_sum", theirs] == pytest.approx(seconds * 1e6)
        assert found[f"{name}_count", theirs] == 1
        bounds = {dict(labels)["le"] for key, labels in found if key == f"{name}_bucket"}
        own_bounds = {dict(labels)["le"] for key, labels in found if key == f"{own}_seconds_bucket"}
        assert sorted(map(float, bounds)) == pytest.approx(
            sorted(float(bound) * 1e6 for bound in own_bounds)
        )
    assert found["RollingBatchSize", theirs] == 0
    host = (("Host", platform.node()),)
    assert found["Response_2XX_total", host] == 1
    assert found["Response_4XX_total", host] == found["Response_5XX_total", host] == 0


def test_a_request_is_in_the_histograms(scraped: str) -> None:
    found = samples(scraped)
    label = (("model_name", "m"),)
    assert found["lmi_request_generated_tokens_sum", label] == 5
    assert found["lmi_request_prompt_tokens_count", label] == 1
    assert found["lmi_request_queue_seconds_sum", label] >= 0
    assert found["lmi_request_queue_seconds_sum", label] < found["lmi_request_seconds_sum", label]


def test_the_boards_queries_are_answered(scraped: str) -> None:
    """Every name with the labels it is asked for by, or none at all in the query."""
    found = [(name, dict(labels)) for name, labels in samples(scraped)]
    for panel in PANELS:
        for query in panel.queries.values():
            names = re.findall(r"\b(lmi_\w+)", query)
            assert names
            by = re.findall(r"by \((\w+)\)", query)
            for name in names:
                labels = [labels for each, labels in found if each == name]
                assert labels, name
                assert all(label in labels[0] for label in by), name


def test_the_board_is_the_one_that_is_made() -> None:
    """python -m lmi_server.http.board > server/deploy/grafana.json"""
    assert BOARD.read_text() == board_text()
    json.loads(board_text())


def test_our_own_names_stay_alone_unless_asked() -> None:
    metrics = Metrics()
    metrics.observer("m").on_finish(FinishReason.EOS)
    assert b"vllm:" not in asyncio.run(metrics.scrape())


def test_reasons_that_are_one_there_are_added_up() -> None:
    metrics = Metrics(["vllm"])
    observer = metrics.observer("m")
    for reason in (FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH):
        observer.on_finish(reason)
    found = samples(asyncio.run(metrics.scrape()).decode())
    stopped = (("finished_reason", "stop"), ("model_name", "m"))
    assert found["vllm:request_success_total", stopped] == 2


def test_others_have_their_turns_while_many_models_are_scraped() -> None:
    metrics = Metrics()
    record = RequestRecord(seconds=1, queue_seconds=0, num_prompt_tokens=2, num_generated_tokens=3)
    for number in range(60):
        metrics.observer(f"m{number}").on_request(record)
    num_turns = 0

    async def main() -> list[bytes]:
        def count() -> None:
            nonlocal num_turns
            num_turns += 1
            asyncio.get_running_loop().call_soon(count)

        count()
        return await asyncio.gather(metrics.scrape(), metrics.scrape())

    whole = generate_latest(metrics.registry)
    assert asyncio.run(main()) == [whole, whole]
    assert num_turns > 2 * whole.count(b"\n") // 1000


def test_a_model_that_goes_takes_its_histograms_with_it() -> None:
    metrics = Metrics()
    record = RequestRecord(seconds=1, queue_seconds=0, num_prompt_tokens=2, num_generated_tokens=3)
    metrics.observer("gone").on_request(record)
    assert b"gone" in asyncio.run(metrics.scrape())
    metrics.engines.forget("gone")
    assert b"gone" not in asyncio.run(metrics.scrape())
