"""The server over the real engine (with the tests' runner): nothing may leak, whoever leaves."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from lmi_core.engine.engine import Engine
from lmi_server.http.metrics import Metrics
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import make_engine
from tests.server.harness import Served, eventually, http_request, serving_backend


@asynccontextmanager
async def serving_engine(runner: FakeRunner, **config: Any) -> AsyncIterator[tuple[Served, Engine]]:
    metrics = Metrics()
    async with (
        make_engine(runner, observer=metrics.observer("model"), **config) as engine,
        serving_backend(engine, metrics) as served,
    ):
        yield served, engine
        await eventually(lambda: engine.stats().num_running == 0)
        assert engine.stats().num_waiting == 0
        assert engine.stats().num_used_blocks == 0


def body(num_tokens: int, prompt: str = "hello", **parameters: Any) -> dict[str, Any]:
    parameters = {"max_new_tokens": num_tokens, "ignore_eos_token": True, **parameters}
    return {"inputs": prompt, "parameters": parameters, "stream": True}


def test_stream_and_metrics() -> None:
    async def run() -> None:
        async with serving_engine(FakeRunner()) as (served, _):
            answer = await served.post(body(12, details=True))
            lines = [json.loads(line) for line in answer.body.splitlines()]
            assert len(lines) == 12
            assert lines[-1]["generated_text"] == "".join(line["token"]["text"] for line in lines)
            assert lines[-1]["details"]["finish_reason"] == "length"
            assert all(line["token"]["log_prob"] <= 0 for line in lines)
            whole = await served.post({**body(12), "stream": False})
            assert json.loads(whole.body)["generated_text"] == lines[-1]["generated_text"]
            async with served.client.get("/metrics") as response:
                text = await response.text()
            assert 'lmi_generated_tokens_total{model_name="model"} 24.0' in text
            assert 'lmi_time_to_first_token_seconds_count{model_name="model"} 2.0' in text
            assert 'lmi_finished_requests_total{model_name="model",reason="length"} 2.0' in text

    asyncio.run(run())


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (body(4, prompt="x" * 10_000), "10000"),
        (body(4, top_p=2), "top_p"),
        (body(4, stop_token_ids=[10**9]), "stop_token_ids"),
        (body(4, stop_sequences=[""]), "empty string"),
        (body(4, prompt="\ud800"), "JSON"),
        (body(4, n=2), "streamed"),
    ],
)
def test_bad_requests_name_the_fault_and_leave_nothing(asked: dict[str, Any], words: str) -> None:
    async def run() -> None:
        async with serving_engine(FakeRunner()) as (served, _):
            answer = await served.post(asked)
            assert answer.status == 424
            assert words in json.loads(answer.body)["error"]

    asyncio.run(run())


def test_prefill_truncate_and_choices() -> None:
    async def run() -> None:
        async with serving_engine(FakeRunner()) as (served, _):
            asked = body(3, n=2, decoder_input_details=True, truncate=4, top_n_tokens=2)
            answer = await served.post({**asked, "stream": False})
            assert answer.status == 200, answer.body
            details = json.loads(answer.body)["details"]
            assert len(details["prefill"]) == 4
            assert len(details["best_of_sequences"]) == 1
            assert [len(top) for top in details["top_tokens"]] == [2, 2, 2]

    asyncio.run(run())


def test_beams_and_their_ranks() -> None:
    async def run() -> None:
        async with serving_engine(FakeRunner()) as (served, _):
            asked = {**body(3, num_beams=3, details=True), "stream": False}
            answer = await served.post(asked)
            assert answer.status == 200, answer.body
            details = json.loads(answer.body)["details"]
            every = [details, *details["best_of_sequences"]]
            means = [
                sum(token["log_prob"] for token in one["tokens"]) / one["generated_tokens"]
                for one in every
            ]
            assert len(means) == 3
            assert means == sorted(means, reverse=True)
            asked = body(3, num_beams=3, n=1)
            streamed = (await served.post(asked)).body.decode().splitlines()
            ids = [json.loads(line)["token"]["id"] for line in streamed]
            assert ids == [token["id"] for token in details["tokens"]]
            answer = await served.post({**body(3, num_beams=9), "stream": False})
            assert answer.status == 424
            assert "8 sequences in a step" in json.loads(answer.body)["error"]

    asyncio.run(run())


def test_full_queue_is_503_with_numbers() -> None:
    async def run() -> None:
        runner = FakeRunner(max_num_seqs=1, step_s=0.01)
        async with serving_engine(runner, max_num_seqs=1, max_queue_size=2) as (served, _):
            calls = [asyncio.create_task(served.post(body(10))) for _ in range(8)]
            answers = await asyncio.gather(*calls)
            statuses = [answer.status for answer in answers]
            assert statuses.count(200) >= 3
            refused = [answer for answer in answers if answer.status == 503]
            assert len(refused) == 8 - statuses.count(200) > 0
            error = json.loads(refused[0].body)
            assert error["type"] == "WlmCapacityException"
            assert "2" in error["message"]

    asyncio.run(run())


def test_random_aborts_leave_the_block_pool_whole() -> None:
    # The clients work in the server's loop: all of them in one turn would hold it.
    opening = asyncio.Semaphore(10)

    async def one(served: Served, rng: random.Random) -> bool:
        """True: read to the end."""
        async with opening:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        try:
            asked = body(rng.randint(1, 40), prompt="p" * rng.randint(1, 60))
            asked["stream"] = rng.random() < 0.8
            writer.write(http_request(json.dumps(asked).encode(), "Connection: close"))
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.05)
                writer.transport.abort()
                return False
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 ")
            return True
        finally:
            writer.close()

    async def run() -> None:
        rng = random.Random(7)
        async with serving_engine(FakeRunner(step_s=0.001), max_queue_size=500) as (served, engine):
            done = await asyncio.gather(*(one(served, rng) for _ in range(200)))
            assert 50 < sum(done) < 150
            assert engine.healthy

    asyncio.run(run())
