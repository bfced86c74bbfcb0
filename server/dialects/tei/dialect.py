"""Routes of text-embeddings-inference: vectors, and texts by their score for a query."""

from __future__ import annotations

import json
from typing import Literal, TypeVar

import msgspec
from aiohttp import web

from lmi_core.engine.pooling_params import PoolingParams
from lmi_core.errors import CapacityError, TaskError, UserError
from lmi_server.dialects.base import Call, HttpError, ParsedCall, Reply
from lmi_server.dialects.decode import decode_json
from lmi_server.dialects.generation import generate
from lmi_server.dialects.pooling import (
    EmptyInputError,
    Inputs,
    PooledRenderer,
    VectorListRenderer,
    check_number,
    embedding_requests,
    inputs_of,
    pair_requests,
)
from lmi_server.dialects.routes import ModelRoute
from lmi_server.dialects.table import Dialect, ErrorForm
from lmi_server.dialects.unknown_fields import report_fields
from lmi_server.models.loaded_model import LoadedModel

T = TypeVar("T")

_JSON = ("application/json",)
_ERRORS = ErrorForm(
    schema={
        "type": "object",
        "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
        "required": ["error", "error_type"],
    },
    statuses={
        400: "nothing was sent",
        401: "the API key is missing or wrong",
        404: "no such route or model",
        405: "wrong method",
        408: "the body came too slowly",
        413: "the request can't be served as written, or is too long",
        422: "the body isn't of its schema",
        424: "the model failed, or is not of the task",
        429: "the server is full",
        503: "the server is not ready or stopping",
    },
)
_KINDS = {400: "Empty", 422: "Validation", 413: "Validation", 429: "Overloaded", 503: "Unhealthy"}


class _Limits(msgspec.Struct, frozen=True, kw_only=True):
    truncate: bool | None = False
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"
    max_queue_s: float | None = None


class EmbedBody(_Limits, frozen=True, kw_only=True):
    """``truncate``: inputs that are too long lose tokens at the side of
    ``truncation_direction``."""

    inputs: Inputs
    normalize: bool = True
    prompt_name: str | None = None
    dimensions: int | None = None


class RankBody(_Limits, frozen=True, kw_only=True):
    """``raw_scores``: the classifier's own instead of those from 0 to 1."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False


_EMBED = msgspec.json.Decoder(EmbedBody)
_RANK = msgspec.json.Decoder(RankBody)


class BodyError(UserError):
    """A body that isn't of its schema."""


def _decoded(decoder: msgspec.json.Decoder[T], call: Call) -> T:
    try:
        return decode_json(decoder, call.body)
    except UserError as error:
        raise BodyError(str(error), field=error.field) from None


def _truncate(body: _Limits) -> Literal["", "left", "right"]:
    if not body.truncate:
        return ""
    return "left" if body.truncation_direction in ("Left", "left") else "right"


def parse_embed(call: Call) -> ParsedCall:
    body = _decoded(_EMBED, call)
    inputs = inputs_of(body.inputs, "inputs")
    params = PoolingParams(
        normalize=body.normalize,
        prompt_name=body.prompt_name,
        dimensions=body.dimensions,
        truncate=_truncate(body),
    )
    requests = embedding_requests(call.request_id, inputs, params, max_queue_s=body.max_queue_s)
    renderer = VectorListRenderer(len(inputs))
    renderer.headers = report_fields(call, body.__struct_fields__)
    return ParsedCall(requests=requests, renderer=renderer, prompt_field="inputs")


def parse_rank(call: Call) -> ParsedCall:
    body = _decoded(_RANK, call)
    check_number(len(body.texts), "texts")
    params = PoolingParams(raw_score=body.raw_scores, truncate=_truncate(body))
    pairs = [(body.query, text) for text in body.texts]
    requests = pair_requests(call.request_id, pairs, params, max_queue_s=body.max_queue_s)
    renderer = _RankRenderer(body)
    renderer.headers = report_fields(call, body.__struct_fields__)
    return ParsedCall(requests=requests, renderer=renderer, prompt_field="texts")


class _RankRenderer(PooledRenderer):
    def __init__(self, body: RankBody) -> None:
        super().__init__(len(body.texts))
        self._body = body

    def finish(self) -> bytes:
        texts = self._body.texts if self._body.return_text else None
        return msgspec.json.encode(
            [
                {"index": index, "score": score} | ({"text": texts[index]} if texts else {})
                for index, score in self.ranking
            ]
        )


async def embed(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate(request, model, parse_embed)


async def rank(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate(request, model, parse_rank)


def tei_error(error: Exception) -> Reply:
    """The response to a call that failed: ``error`` and ``error_type``."""
    headers, close = {}, False
    text = str(error)
    match error:
        case HttpError():
            status, headers, close = error.status, dict(error.headers), error.close
        case EmptyInputError():
            status = 400
        case BodyError():
            status = 422
        case TaskError():
            status = 424
        case UserError():
            status, text = 413, f"Input validation error: {error}"
        case CapacityError():
            status, text = 429, "Model is overloaded"
        case _:
            status = 424
    body = {"error": text, "error_type": _KINDS.get(status, "Backend")}
    return Reply(status=status, body=json.dumps(body).encode(), headers=headers, close=close)


TEI = Dialect(
    name="tei",
    routes=(
        ModelRoute("POST", "/embed", embed, "vectors of texts", bodies=(EmbedBody,), answers=_JSON),
        ModelRoute(
            "POST", "/rerank", rank, "texts by their score", bodies=(RankBody,), answers=_JSON
        ),
    ),
    error=lambda error, _: tei_error(error),
    errors=_ERRORS,
)
