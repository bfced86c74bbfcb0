"""The real ``openai`` client's embeddings, and reranking, of servers with tiny random models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from tests.cli.test_native import post, serving
from tests.pooled_checkpoints import decoder
from tests.server.batches.test_batches import answers, begin, ended

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    option = f"batch_dir={tmp_path_factory.mktemp('batches')}"
    with serving(str(decoder("qwen3")), "--served-model-name", "tiny", "--option", option) as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_embeddings(client: openai.OpenAI) -> None:
    """The client asks for base64 by itself."""
    inputs = ["a fox", "", "a heron sleeps"]
    with pytest.raises(openai.BadRequestError, match=r"empty.*number 1, counted from 0"):
        client.embeddings.create(model="tiny", input=inputs)
    inputs.remove("")
    answer = client.embeddings.create(model="tiny", input=inputs)
    assert (answer.model, answer.object) == ("tiny", "list")
    assert [data.index for data in answer.data] == [0, 1]
    for text, data in zip(inputs, answer.data, strict=True):
        [alone] = client.embeddings.create(model="tiny", input=text, encoding_format="float").data
        assert alone.embedding == data.embedding
        assert np.linalg.norm(data.embedding) == pytest.approx(1, abs=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 2


def test_a_batch(client: openai.OpenAI) -> None:
    url: Any = "/v1/embeddings"
    bodies = {"r0": {"input": "a fox"}, "r1": {"input": ["a", "b"]}, "r2": {"input": []}}
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})
        for name, body in bodies.items()
    ]
    batch_id = begin(client, *lines, endpoint=url)
    batch = ended(client, batch_id)
    output = answers(client, batch.output_file_id)
    [alone] = client.embeddings.create(model="tiny", input="a fox", encoding_format="float").data
    assert output["r0"]["response"]["body"]["data"][0]["embedding"] == alone.embedding
    assert len(output["r1"]["response"]["body"]["data"]) == 2
    failed = answers(client, batch.error_file_id)
    assert failed["r2"]["response"]["body"]["error"]["param"] == "input"


def test_embeddings_of_token_ids(client: openai.OpenAI) -> None:
    [one] = client.embeddings.create(model="tiny", input=[5, 6, 7]).data
    first, second = client.embeddings.create(model="tiny", input=[[5, 6, 7], [8]]).data
    assert first.embedding == one.embedding != second.embedding
    with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
        client.embeddings.create(model="tiny", input=[5, 5000])


def test_dimensions(client: openai.OpenAI) -> None:
    [whole] = client.embeddings.create(model="tiny", input="a fox").data
    [part] = client.embeddings.create(model="tiny", input="a fox", dimensions=8).data
    cut = np.array(whole.embedding[:8])
    np.testing.assert_allclose(part.embedding, cut / np.linalg.norm(cut), rtol=1e-5)
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="tiny", input="a fox", dimensions=65)
    assert caught.value.param == "dimensions"


def test_async_client(url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            asked = [client.embeddings.create(model="tiny", input=f"fox {i}") for i in range(20)]
            answers = await asyncio.gather(*asked)
        assert len({tuple(answer.data[0].embedding) for answer in answers}) == 20

    asyncio.run(run())


def test_refusals(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a fox")
    with pytest.raises(openai.BadRequestError, match="context length is 512") as caught:
        client.embeddings.create(model="tiny", input="a fox " * 600)
    assert caught.value.code == "context_length_exceeded"
    cut = {"truncate_prompt_tokens": -1}
    answer = client.embeddings.create(model="tiny", input="a fox " * 600, extra_body=cut)
    assert answer.usage.prompt_tokens == 512
    with pytest.raises(openai.BadRequestError, match="doesn't generate text"):
        client.completions.create(model="tiny", prompt="a fox")
    for wrong in (["a", 3], 5, [["a"]], []):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="tiny", input=wrong)  # type: ignore[arg-type]
        assert caught.value.param is not None
        assert caught.value.param.startswith("input")


def test_rerank() -> None:
    path = decoder("qwen3", "AutoModelForSequenceClassification")
    with serving(str(path), "--served-model-name", "tiny") as base:
        documents = ["a fox", {"text": "a heron sleeps"}, "nothing"]
        body = {"model": "tiny", "query": "birds", "documents": documents}
        status, answer = _posted(f"{base}/v1/rerank", body)
        assert status == 200
        scores = [result["relevance_score"] for result in answer["results"]]
        assert scores == sorted(scores, reverse=True)
        assert {result["index"] for result in answer["results"]} == {0, 1, 2}
        by_index = {result["index"]: result["document"]["text"] for result in answer["results"]}
        assert by_index[1] == "a heron sleeps"
        assert answer["usage"]["total_tokens"] > 0
        _, best = _posted(f"{base}/v1/rerank", body | {"top_n": 1, "return_documents": False})
        [only] = best["results"]
        assert only == {"index": answer["results"][0]["index"], "relevance_score": scores[0]}
        status, error = _posted(f"{base}/v1/rerank", body | {"top_n": 0})
        assert (status, error["error"]["param"]) == (400, "top_n")
        status, error = _posted(f"{base}/v1/embeddings", {"input": "a fox"})
        assert status == 400
        assert "use /rerank or /v1/rerank" in error["error"]["message"]
        ranked = _posted(f"{base}/rerank", {"query": "birds", "texts": ["a fox", "nothing"]})[1]
        assert {each["index"]: each["score"] for each in ranked} == {
            result["index"]: result["relevance_score"]
            for result in _posted(f"{base}/v1/rerank", body | {"documents": ["a fox", "nothing"]})[
                1
            ]["results"]
        }


def _posted(url: str, body: object) -> tuple[int, Any]:
    status, text = post(url, body)
    return status, json.loads(text)
