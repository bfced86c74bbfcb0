"""OpenAI's embeddings, and reranking in the form that Cohere, Jina and vLLM share."""

from __future__ import annotations

import json
from functools import partial
from typing import Literal

import msgspec
from aiohttp import web

from lmi_core.engine.pooling_params import PoolingParams
from lmi_core.errors import UserError
from lmi_core.weights.formats import FloatArray
from lmi_server.dialects.base import Call, ParsedCall
from lmi_server.dialects.decode import decode_json
from lmi_server.dialects.generation import generate
from lmi_server.dialects.openai.openai import adapter_named, check_content_type
from lmi_server.dialects.pooling import (
    Format,
    Inputs,
    PooledRenderer,
    check_number,
    embedding_requests,
    inputs_of,
    pair_requests,
    written,
)
from lmi_server.dialects.routes import ModelRoute
from lmi_server.dialects.unknown_fields import report_fields
from lmi_server.models.loaded_model import LoadedModel
from lmi_server.models.stand_in import DecodingModel

Truncate = Literal[-1] | None
_JSON = ("application/json",)


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's fields, and those that vLLM and sentence-transformers add."""

    input: Inputs
    model: str | None = None
    encoding_format: Format = "float"
    dimensions: int | None = None
    user: str | None = None
    normalize: bool | None = None
    prompt_name: str | None = None
    max_queue_s: float | None = None
    truncate_prompt_tokens: Truncate = None
    """-1: inputs that are too long lose their last tokens."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    """``top_n``: of the best documents; all of them without."""

    query: str
    documents: list[str | Document]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = True
    max_queue_s: float | None = None
    truncate_prompt_tokens: Truncate = None
    """As above."""
    user: str | None = None


_EMBEDDINGS = msgspec.json.Decoder(EmbeddingsBody)
_RERANK = msgspec.json.Decoder(RerankBody)


def parse_embeddings(model: DecodingModel, call: Call) -> ParsedCall:
    check_content_type(call.content_type)
    body = decode_json(_EMBEDDINGS, call.body)
    adapter = adapter_named(model, body.model)
    inputs = inputs_of(body.input, "input")
    params = PoolingParams(
        dimensions=body.dimensions,
        normalize=body.normalize,
        prompt_name=body.prompt_name,
        truncate="right" if body.truncate_prompt_tokens else "",
    )
    requests = embedding_requests(
        call.request_id, inputs, params, adapter, max_queue_s=body.max_queue_s
    )
    model_name = body.model or model.options.model_name
    renderer = _EmbeddingsRenderer(len(inputs), model_name, body.encoding_format)
    renderer.headers = report_fields(call, body.__struct_fields__)
    return ParsedCall(requests=requests, renderer=renderer, prompt_field="input")


def parse_rerank(model: DecodingModel, call: Call) -> ParsedCall:
    check_content_type(call.content_type)
    body = decode_json(_RERANK, call.body)
    adapter = adapter_named(model, body.model)
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    check_number(len(documents), "documents")
    if body.top_n is not None and body.top_n < 1:
        raise UserError(f"top_n is {body.top_n}, but must be at least 1", field="top_n")
    params = PoolingParams(truncate="right" if body.truncate_prompt_tokens else "")
    pairs = [(body.query, document) for document in documents]
    requests = pair_requests(call.request_id, pairs, params, adapter, max_queue_s=body.max_queue_s)
    renderer = _RerankRenderer(call.request_id, body, documents, model.options.model_name)
    renderer.headers = report_fields(call, body.__struct_fields__)
    return ParsedCall(requests=requests, renderer=renderer, prompt_field="documents")


class _EmbeddingsRenderer(PooledRenderer):
    def __init__(self, num_inputs: int, model: str, format: Format) -> None:
        super().__init__(num_inputs)
        self._model = model
        self._format = format

    def result(self, pooled: FloatArray) -> bytes:
        return written(pooled, self._format)

    def finish(self) -> bytes:
        data = b",".join(
            b'{"object":"embedding","index":%d,"embedding":%b}' % (i, part)
            for i, part in enumerate(self.parts)
        )
        usage = {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens}
        rest = f'"model":{json.dumps(self._model)},"usage":{json.dumps(usage)}'
        return b'{"object":"list","data":[' + data + b"]," + rest.encode() + b"}"


class _RerankRenderer(PooledRenderer):
    def __init__(self, request_id: str, body: RerankBody, documents: list[str], model: str) -> None:
        super().__init__(len(documents))
        self._id = request_id
        self._body = body
        self._documents = documents
        self._model = body.model or model

    def finish(self) -> bytes:
        results = []
        for index, score in self.ranking[: self._body.top_n]:
            result: dict[str, object] = {"index": index}
            if self._body.return_documents:
                result["document"] = {"text": self._documents[index]}
            results.append({**result, "relevance_score": score})
        return msgspec.json.encode(
            {
                "id": f"rerank-{self._id}",
                "model": self._model,
                "usage": {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens},
                "results": results,
            }
        )


async def embed(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate(request, model, partial(parse_embeddings, model))


async def rerank(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate(request, model, partial(parse_rerank, model))


POOLING_ROUTES = (
    ModelRoute(
        "POST",
        "/v1/embeddings",
        embed,
        "embeddings (OpenAI)",
        bodies=(EmbeddingsBody,),
        answers=_JSON,
    ),
    ModelRoute(
        "POST",
        "/v1/rerank",
        rerank,
        "documents by their score (Cohere, Jina)",
        bodies=(RerankBody,),
        answers=_JSON,
    ),
)
