"""text-embeddings-inference's routes, and DJL-Serving's bodies for the same, of tiny models in the
test's own event loop, where a watchdog looks at how long it is held."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmi_core.engine.engine import Engine
from lmi_core.settings.engine_config import EngineConfig
from lmi_server.dialects.unknown_fields import IGNORED_HEADER
from lmi_server.http.metrics import Metrics
from tests.checkpoints import cached_checkpoint
from tests.pooled_checkpoints import decoder
from tests.server.harness import Served, eventually, serving_backend

pytest.importorskip("transformers")

EMBEDDER = ("qwen3", "AutoModel")
RERANKER = ("qwen3", "AutoModelForSequenceClassification")


@asynccontextmanager
async def serving(name: str, kind: str | None = None, **settings: Any) -> AsyncIterator[Served]:
    """``kind``: of a model that is pooled; None: one that generates."""
    settings = {"num_threads": 1, "kv_cache_bytes": 16 << 20, **settings}
    model = cached_checkpoint(name) if kind is None else decoder(name, kind)
    config = EngineConfig(model=Path(model), **settings)
    metrics = Metrics()
    async with (
        Engine(config, observer=metrics.observer("model")) as engine,
        serving_backend(engine, metrics) as served,
    ):
        yield served


async def asked(served: Served, path: str, body: Any) -> tuple[int, Any]:
    answer = await served.post(body, path)
    return answer.status, json.loads(answer.body)


def test_embed() -> None:
    async def run() -> None:
        async with serving(*EMBEDDER) as served:
            status, [one] = await asked(served, "/embed", {"inputs": "a fox"})
            assert status == 200
            assert math.hypot(*one) == pytest.approx(1, abs=1e-6)
            _, two = await asked(served, "/embed", {"inputs": ["a heron", "a fox"]})
            assert two[1] == one != two[0]
            _, [raw] = await asked(served, "/embed", {"inputs": "a fox", "normalize": False})
            np.testing.assert_allclose(np.array(raw) / math.hypot(*raw), one, rtol=1e-5)
            _, [part] = await asked(served, "/embed", {"inputs": [5, 6], "dimensions": 3})
            assert len(part) == 3
            _, both = await asked(served, "/embed", {"inputs": [[5, 6], [7]], "dimensions": 3})
            assert both[0] == part
            long = {"inputs": "a fox " * 600, "truncate": True}
            _, left = await asked(served, "/embed", {**long, "truncation_direction": "Left"})
            _, right = await asked(served, "/embed", {**long, "truncation_direction": "Right"})
            assert left != right

    asyncio.run(run())


def test_a_wrong_text_among_many_is_refused_before_others_are_computed() -> None:
    async def run() -> None:
        async with serving(*EMBEDDER) as served:
            for fine, wrong, problem in (
                ("a fox", "", "empty"),
                ("a fox", "a fox " * 600, "tokens"),
                ([5], [1 << 20], str(1 << 20)),
            ):
                inputs = [fine] * 199 + [wrong]
                status, answer = await asked(served, "/embed", {"inputs": inputs})
                assert status in (413, 422)
                assert problem in answer["error"]
            assert served.engine.stats().totals.num_prompt_tokens == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "status", "kind", "text"),
    [
        ({"inputs": []}, 400, "Empty", "inputs must not be empty"),
        ({"inputs": 5}, 422, "Validation", "inputs must be"),
        ({}, 422, "Validation", "inputs"),
        ({"inputs": ""}, 413, "Validation", "Input validation error: the prompt is empty"),
        ({"inputs": "a fox " * 600}, 413, "Validation", "512 tokens, but the input has"),
        ({"inputs": "a", "dimensions": 0}, 413, "Validation", "dimensions is 0"),
        ({"inputs": "a", "prompt_name": "query"}, 413, "Validation", "prompts are: none"),
        ({"inputs": ["a"] * 3000}, 413, "Validation", "at most 2048"),
    ],
)
def test_refusals(body: Any, status: int, kind: str, text: str) -> None:
    async def run() -> None:
        async with serving(*EMBEDDER) as served:
            found, error = await asked(served, "/embed", body)
            assert (found, error["error_type"]) == (status, kind)
            assert text in error["error"]
            found, error = await asked(served, "/rerank", {"query": "a", "texts": ["b"]})
            assert (found, error["error_type"]) == (424, "Backend")
            assert "use /embed" in error["error"]
            found, error = await asked(served, "/generate", {"inputs": "a"})
            assert "the model 'model' gives embeddings" in error["error"]

    asyncio.run(run())


def test_rerank() -> None:
    async def run() -> None:
        async with serving(*RERANKER) as served:
            texts = ["a fox", "a heron sleeps", "nothing"]
            body = {"query": "birds", "texts": texts}
            _, ranked = await asked(served, "/rerank", body)
            scores = [each["score"] for each in ranked]
            assert scores == sorted(scores, reverse=True)
            assert all(0 < score < 1 for score in scores)
            extra = {"raw_scores": True, "return_text": True}
            _, raw = await asked(served, "/rerank", body | extra)
            assert [each["text"] for each in raw] == [texts[each["index"]] for each in ranked]
            for each, score in zip(raw, scores, strict=True):
                assert 1 / (1 + math.exp(-each["score"])) == pytest.approx(score, abs=1e-6)

    asyncio.run(run())


def test_invocations_of_djl_serving() -> None:
    async def run() -> None:
        async with serving(*EMBEDDER) as served:
            _, one = await asked(served, "/invocations", {"inputs": "a fox"})
            _, both = await asked(served, "/invocations", {"inputs": ["a fox", "a heron"]})
            assert both[0] == one
            assert len(both) == 2
            parameters = {"dimensions": 3, "normalize": False}
            body = {"inputs": "a fox", "parameters": parameters}
            _, raw = await asked(served, "/embed", {"inputs": "a fox", **parameters})
            assert await asked(served, "/invocations", body) == (200, *raw)
            long = {"inputs": "a fox " * 600}
            assert (await asked(served, "/invocations", long))[0] == 424
            cut = {**long, "parameters": {"truncate": True, "temperature": 1}}
            answer = await served.post(cut, "/invocations")
            assert answer.status == 200
            assert answer.headers[IGNORED_HEADER] == "parameters.temperature"
            metrics = (await served.ask("GET", "/metrics")).body.decode()
            reasons = dict(re.findall(r'finished\w*_total.*reason="(\w+)".* (\S+)\n', metrics))
            assert {reason for reason, count in reasons.items() if float(count)} == {"pooled"}
            status, error = await asked(served, "/invocations", {"prompt": "a fox"})
            assert status == error["code"] == 424
            assert "inputs" in error["error"]
        async with serving(*RERANKER) as served:
            pair = {"text": "birds", "text_pair": "a heron"}
            _, score = await asked(served, "/invocations", pair)
            assert await asked(served, "/invocations", [pair]) == (200, [score])
            query = {"query": "birds", "texts": ["a heron", "a fox"]}
            status, scores = await asked(served, "/invocations", query)
            long = {"query": "a", "texts": ["b " * 600]}
            assert (await asked(served, "/invocations", long))[0] == 424
            cut = {**long, "parameters": {"truncate": True}}
            assert (await asked(served, "/invocations", cut))[0] == 200
            typo = await served.post({**query, "parameter": {}}, "/invocations")
            assert typo.headers[IGNORED_HEADER] == "parameter"
            assert status == 200
            assert scores[0] == score != scores[1]
            assert len(score) == 1
            named = {"key": "birds", "value": "a heron"}
            assert await asked(served, "/invocations", named) == (200, score)
            status, error = await asked(served, "/invocations", {"text": "birds"})
            assert (status, error["error"]) == (424, "Missing text or text_pair in json")

    asyncio.run(run())


def test_many_inputs_leave_room_for_others() -> None:
    """A thousand inputs of one call neither hold the loop nor fill the engine's queue."""

    async def run() -> None:
        async with serving(*EMBEDDER, max_num_seqs=8, max_queue_size=100) as served:
            inputs = [f"the fox number {i} sleeps near the river" for i in range(1000)]
            many = asyncio.create_task(asked(served, "/embed", {"inputs": inputs}))
            most = 0
            while not many.done():
                stats = served.engine.stats()
                most = max(most, stats.num_running + stats.num_waiting)
                await asyncio.sleep(0.001)
            _, one = await asked(served, "/embed", {"inputs": inputs[7]})
            status, vectors = await many
            assert status == 200
            assert 8 < most <= 72
            assert len(vectors) == 1000
            impatient = {"inputs": inputs[:40], "max_queue_s": 0}
            assert await asked(served, "/embed", impatient) == (200, vectors[:40])
            assert vectors[7] == one[0]
            assert served.engine.stats().num_used_blocks == 0

    asyncio.run(run())


@pytest.mark.parametrize("padding", [[], [0] * 40_000], ids=["small", "decoded in a child"])
@pytest.mark.parametrize(
    ("model", "route"), [(EMBEDDER, "/v1/embeddings"), (RERANKER, "/v1/rerank")]
)
def test_a_chat_without_a_template_is_sent_to_what_the_model_has(
    model: tuple[str, str], route: str, padding: list[int]
) -> None:
    async def run() -> None:
        async with serving(*model) as served:
            body = {"messages": [{"role": "user", "content": "a fox"}], "padding": padding}
            status, answer = await asked(served, "/v1/chat/completions", body)
            assert status == 400
            assert f"use {route} instead" in answer["error"]["message"]

    asyncio.run(run())


@pytest.mark.parametrize("num_inputs", [1, 100])
def test_a_model_that_generates_says_so_of_any_number_of_inputs(num_inputs: int) -> None:
    async def run() -> None:
        async with serving("qwen3") as served:
            texts = ["a fox"] * num_inputs
            for path, field, status in (
                ("/v1/embeddings", {"input": texts}, 400),
                ("/v1/rerank", {"query": "a", "documents": texts}, 400),
                ("/embed", {"inputs": texts}, 424),
                ("/rerank", {"query": "a", "texts": texts}, 424),
            ):
                answer = await served.post(field, path)
                assert (answer.status, b"generates text" in answer.body) == (status, True), path

    asyncio.run(run())


PAIRS = {"query": "birds", "texts": ["a heron"]}
WAITING: list[tuple[tuple[str, str], str, dict[str, Any], int, int]] = [
    (EMBEDDER, "/embed", {"inputs": "a fox"}, 429, 413),
    (EMBEDDER, "/v1/embeddings", {"input": "a fox"}, 429, 400),
    (EMBEDDER, "/invocations", {"inputs": "a fox", "parameters": {}}, 503, 424),
    (RERANKER, "/rerank", PAIRS, 429, 413),
    (RERANKER, "/v1/rerank", {"query": "birds", "documents": ["a heron"]}, 429, 400),
    (RERANKER, "/invocations", {**PAIRS, "parameters": {}}, 503, 424),
]
"""Models, routes, bodies, and the statuses of who waited too long and of what is no time."""


@pytest.mark.parametrize("model", [EMBEDDER, RERANKER])
def test_who_may_not_wait_is_refused_where_others_run(model: tuple[str, str]) -> None:
    async def run() -> None:
        async with serving(*model, max_num_seqs=1) as served:
            texts = [f"the fox number {i} sleeps near the river" * 8 for i in range(2000)]
            many = {"query": "a", "texts": texts} if model == RERANKER else {"inputs": texts}

            async def ask(seconds: float) -> list[tuple[int, Any]]:
                answers = []
                for _, path, body, *_ in (each for each in WAITING if each[0] == model):
                    named = {"max_queue_s": seconds}
                    has_room = "parameters" in body
                    body = {**body, **({"parameters": named} if has_room else named)}
                    answers.append(await asked(served, path, body))
                return answers

            idle, wrong = await ask(0), await ask(-1)
            busy = asyncio.create_task(asked(served, "/invocations", many))
            await eventually(lambda: served.engine.stats().num_waiting > 0)
            late = await ask(0)
            assert not busy.done()
            busy.cancel()
            assert [status for status, _ in idle] == [200, 200, 200]
            expected = [each[3:] for each in WAITING if each[0] == model]
            assert [(a[0], b[0]) for a, b in zip(late, wrong, strict=True)] == expected
            assert all("max_queue_s must be" in json.dumps(answer) for _, answer in wrong)

    asyncio.run(run())
