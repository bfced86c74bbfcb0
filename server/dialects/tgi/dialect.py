"""TGI's routes (its router/src/server.rs): admission, streams whose errors are events, health.

Where this differs from TGI on purpose: log-probabilities are the model's own, before penalties and
temperature; frequency and presence penalties have OpenAI's definition; chat templates are rendered
as ``transformers`` renders them; a stop string also ends the text inside a token; with an API key,
``/v1/models``, ``/metrics`` and ``/chat_tokenize`` need it too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from aiohttp import web

from lmi_core.engine.outputs import TokenEvent
from lmi_core.errors import CapacityError, LmiError
from lmi_server.dialects.base import HttpError, ParsedCall, Renderer
from lmi_server.dialects.generation import read_known
from lmi_server.dialects.large_bodies import rendered
from lmi_server.dialects.routes import ModelAnswer, ModelRoute, ServerRoute
from lmi_server.dialects.table import Dialect, ErrorForm
from lmi_server.dialects.tgi import errors as tgi_errors
from lmi_server.dialects.tgi.metrics import RequestRecord, TgiMetrics
from lmi_server.dialects.tgi.schema import CompatBody, GenerateBody, body_decoder
from lmi_server.dialects.tgi.tgi import (
    DecodedCall,
    check_call,
    check_content_type,
    decode_compat,
    decode_generate,
    fallback_of,
    headers_of,
    limits_of,
    num_sequences,
)
from lmi_server.dialects.tgi.tokens import chat_tokens, token_array
from lmi_server.dialects.tgi.tool_run import ToolRun
from lmi_server.dialects.tgi.v1 import chat_call, chat_text, completion_call, invocation_call
from lmi_server.dialects.tgi.v1_schema import ChatBody, CompletionBody
from lmi_server.http.long_body import body_of
from lmi_server.http.metrics import CONTENT_TYPE, METER, RequestMeter
from lmi_server.http.openapi import openapi_route
from lmi_server.http.streaming import owned_requests, respond
from lmi_server.http.tenants import owned
from lmi_server.models.loaded_model import LoadedModel
from lmi_server.models.model_registry import MODELS, ModelRegistry
from lmi_server.models.recorded import recorded

_ANSWERS = ("application/json", "text/event-stream")
_ERRORS = ErrorForm(
    schema={
        "type": "object",
        "properties": {"error": {"type": "string"}, "error_type": {"type": "string"}},
        "required": ["error", "error_type"],
    },
    statuses={
        400: "the body isn't JSON",
        401: "the API key is missing or wrong",
        404: "no such route",
        405: "wrong method",
        408: "the body came too slowly",
        413: "the body is too long",
        415: "the body doesn't claim to be JSON",
        422: "the request can't be served as written",
        424: "a step failed",
        429: "the server is full",
        500: "the server failed",
        503: "the server is not ready or stopping",
    },
    has_text=True,
)
_decode_generate_body = body_decoder(GenerateBody)


class Permits:
    """How many sequences run or wait at once."""

    def __init__(self, limit: int) -> None:
        self._num_free = limit

    @contextmanager
    def take(self, num_permits: int) -> Iterator[None]:
        """Hold permits; CapacityError when there aren't enough."""
        if num_permits > self._num_free:
            raise CapacityError("too many requests are being served (max_concurrent_requests)")
        self._num_free -= num_permits
        try:
            yield
        finally:
            self._num_free += num_permits


class TgiService:
    """What TGI's routes of one model share."""

    def __init__(self, model: LoadedModel) -> None:
        self.permits = Permits(model.options.tgi.max_concurrent_requests)
        self.metrics = TgiMetrics()


async def _read_json(request: web.Request, model: LoadedModel) -> bytes:
    """A body that claims to be JSON."""
    check_content_type(request.headers.get("Content-Type", ""))
    return await model.admission.read_body(request)


async def generate(
    request: web.Request, model: LoadedModel, decode: Callable[[bytes], DecodedCall]
) -> web.StreamResponse:
    """The answer to a body that ``decode`` understands."""
    tgi = model.of(TgiService)
    with model.admission.enter():
        model.shared.loop_lag.wake()
        tgi.metrics.begin()
        body = await _read_json(request, model)
        try:
            call = await read_known(request, model, decode, body)
        except LmiError as error:
            tgi.metrics.fail(error)
            raise
        return await _run(request, model, call)


async def _run(request: web.Request, model: LoadedModel, call: DecodedCall) -> web.StreamResponse:
    """Check, run and answer. Once a stream is asked for, errors are events of it."""
    meter, options, tgi = request[METER], model.options.tgi, model.of(TgiService)
    metrics = tgi.metrics
    try:
        with tgi.permits.take(num_sequences(options, call)):
            validation_started = meter.seconds
            request_id = f"{meter.request_id}-{next(model.call_numbers)}"
            parsed = await check_call(model, call, request_id=request_id, started_s=meter.started)
            backend = recorded(request, model)
            fallback = await fallback_of(model, call, request_id)
            if fallback is not None:
                backend = ToolRun(backend, owned(request, fallback), call.on_text)
            validation_seconds = meter.seconds - validation_started
            watched = WatchedRenderer(parsed.renderer)
            requests = await owned_requests(request, backend, parsed)
            response = await respond(request, model, backend, requests, watched)
    except LmiError as error:
        metrics.fail(error)
        if not call.streams:
            raise
        return web.Response(
            body=call.render_error(error, options.version),
            headers={**headers_of(options, call), "Content-Type": "text/event-stream"},
        )
    except (asyncio.CancelledError, ConnectionError) as error:
        metrics.fail(error)
        raise
    if watched.failure is not None:
        metrics.fail(watched.failure)
    else:
        metrics.succeed(_record(parsed, meter, validation_seconds), model.info)
    return response


class WatchedRenderer(Renderer):
    """Another renderer, that remembers the error which ended its stream."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.streams = renderer.streams
        self.content_type = renderer.content_type
        self.starts_at_once = renderer.starts_at_once
        self.keep_alive = renderer.keep_alive
        self.headers = renderer.headers
        self.failure: Exception | None = None

    def final_headers(self) -> Mapping[str, str]:
        return self._renderer.final_headers()

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        return self._renderer.feed(index, events)

    def finish(self) -> bytes:
        return self._renderer.finish()

    def error(self, error: Exception) -> bytes:
        self.failure = error
        return self._renderer.error(error)


def _record(parsed: ParsedCall, meter: RequestMeter, validation_seconds: float) -> RequestRecord:
    limits = [request.params.max_new_tokens or 0 for request in parsed.requests]
    return RequestRecord(
        seconds=meter.seconds,
        validation_seconds=validation_seconds,
        queue_seconds=meter.queue_seconds,
        num_prompt_tokens=meter.num_prompt_tokens,
        max_new_tokens=max(limits),
        num_generated_tokens=meter.num_generated_tokens,
    )


async def compat(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate(request, model, decode_compat)


async def generate_whole(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate(request, model, partial(decode_generate, streams=False))


async def generate_stream(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate(request, model, partial(decode_generate, streams=True))


async def invoke(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate(request, model, partial(invocation_call, model))


async def chat(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate(request, model, partial(chat_call, model))


async def complete(request: web.Request, model: LoadedModel) -> web.StreamResponse:
    return await generate(request, model, partial(completion_call, model))


async def health(request: web.Request, models: ModelRegistry) -> web.Response:
    """200 and no body while every engine works."""
    if not all(model.takes_requests for model in models):
        raise HttpError(503, "healthcheck", "unhealthy")
    return web.Response(content_type="text/plain")


async def information(request: web.Request, model: LoadedModel) -> web.Response:
    """What is served, and its limits; release 2 also names the model's type and the capacity."""
    options, limits = model.options.tgi, limits_of(model)
    runner = model.info.runner
    is_older = options.version < 3
    kind = {"model_dtype": runner.dtype, "model_device_type": "cpu"}
    capacity = {
        "max_batch_total_tokens": runner.num_blocks * runner.block_size,
        "max_batch_size": runner.max_num_seqs,
    }
    return web.json_response(
        {
            "model_id": options.model_id,
            "model_sha": options.model_sha,
            **(kind if is_older else {}),
            "model_pipeline_tag": None,
            "max_concurrent_requests": options.max_concurrent_requests,
            "max_best_of": options.max_best_of,
            "max_stop_sequences": options.max_stop_sequences,
            "max_input_tokens": limits.max_input,
            "max_total_tokens": limits.max_total,
            **(capacity if is_older else {}),
            "validation_workers": 2,
            "max_client_batch_size": options.max_client_batch_size,
            "router": "text-generation-router",
            "version": options.release,
            "sha": None,
            "docker_label": None,
        },
        dumps=_compact,
    )


async def metrics(request: web.Request, model: LoadedModel) -> web.Response:
    """TGI's metrics, then those that every dialect has."""
    text = model.of(TgiService).metrics.render(model.info, model.backend.stats())
    body = text + await model.shared.metrics.scrape()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def list_models(request: web.Request, model: LoadedModel) -> web.Response:
    """The model's id, as TGI has it; of several models, the names that requests may use."""
    served = request.app[MODELS]
    names = {model.options.tgi.model_id: None}
    if served.sole is None:
        names = dict.fromkeys(each.name for each in served if each.loaded is not None)
    data = [{"id": n, "object": "model", "created": 0, "owned_by": n} for n in names]
    return web.json_response({"object": "list", "data": data}, dumps=_compact)


async def tokenize(request: web.Request, model: LoadedModel) -> web.Response:
    with model.admission.enter():
        text = await read_known(request, model, _inputs, await _read_json(request, model))
        spans = await model.tokenizer.spans(text)
        body = await rendered(partial(token_array, text, spans), len(spans))
    return web.Response(body=body_of(body), content_type="application/json")


async def chat_tokenize(request: web.Request, model: LoadedModel) -> web.Response:
    with model.admission.enter():
        read = await _read_json(request, model)
        text = await read_known(request, model, partial(chat_text, model), read)
        spans = await model.tokenizer.spans(text, add_special_tokens=False)
        body = await rendered(partial(chat_tokens, text, spans), len(spans))
    return web.Response(body=body_of(body), content_type="application/json")


def _inputs(body: bytes) -> str:
    return _decode_generate_body(body).inputs


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _post(path: str, answer: ModelAnswer, what: str, *bodies: type) -> ModelRoute:
    return ModelRoute("POST", path, answer, f"{what} (TGI)", bodies=bodies, answers=_ANSWERS)


def _health(path: str) -> ServerRoute:
    return ServerRoute("GET", path, health, "health", is_open=True)


_JSON = ("application/json",)
TGI = Dialect(
    name="tgi",
    routes=(
        _post("/", compat, "generate", CompatBody),
        _post("/generate", generate_whole, "generate", GenerateBody),
        _post("/generate_stream", generate_stream, "generate", GenerateBody),
        _post("/invocations", invoke, "generate", CompatBody, ChatBody, CompletionBody),
        _post("/v1/chat/completions", chat, "chat", ChatBody),
        _post("/v1/completions", complete, "complete a text", CompletionBody),
        ModelRoute("GET", "/v1/models", list_models, "models (TGI)", answers=_JSON),
        _post("/tokenize", tokenize, "tokens of a text", GenerateBody),
        _post("/chat_tokenize", chat_tokenize, "tokens of a chat", ChatBody),
        ModelRoute("GET", "/info", information, "limits (TGI)", is_open=True, answers=_JSON),
        _health("/"),
        _health("/health"),
        _health("/ping"),
        ModelRoute(
            "GET",
            "/metrics",
            metrics,
            "Prometheus metrics, also TGI's",
            answers=("text/plain",),
        ),
        openapi_route(),
        openapi_route("/api-doc/openapi.json"),
    ),
    error=lambda error, _: tgi_errors.reply(error),
    errors=_ERRORS,
    has_open_calls=True,  # TGI lets pages of any site call
)
