"""TGI's routes (TGI format reference, 3.1): admission, streams whose errors are events, health.

Where this differs from TGI on purpose: log-probabilities are the model's own, before penalties and
temperature; frequency and presence penalties have OpenAI's definition; chat templates are rendered
as ``transformers`` renders them; a stop string also ends the text inside a token; with an API key,
``/v1/models``, ``/metrics`` and ``/chat_tokenize`` need it too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from aiohttp import web

from lmi_core.engine.outputs import TokenEvent
from lmi_core.errors import CapacityError, LmiError
from lmi_server.dialects.base import HttpError, Plan, Renderer
from lmi_server.dialects.large_bodies import rendered
from lmi_server.dialects.routes import METER, Handler, Route, Service, read_body
from lmi_server.dialects.table import Dialect, ErrorForm
from lmi_server.dialects.tgi import errors as tgi_errors
from lmi_server.dialects.tgi.metrics import RequestRecord, TgiMetrics
from lmi_server.dialects.tgi.schema import CompatBody, GenerateBody, body_decoder
from lmi_server.dialects.tgi.tgi import (
    Job,
    TgiProtocol,
    check_content_type,
    decode_compat,
    decode_generate,
)
from lmi_server.dialects.tgi.tokens import chat_tokens, token_array
from lmi_server.dialects.tgi.tool_run import ToolRun
from lmi_server.dialects.tgi.v1 import TgiV1
from lmi_server.dialects.tgi.v1_schema import ChatBody, CompletionBody
from lmi_server.http.metrics import CONTENT_TYPE, RequestMeter
from lmi_server.http.openapi import openapi_route
from lmi_server.http.streaming import respond
from lmi_server.http.tenants import salted
from lmi_server.models.backend import Generator
from lmi_server.models.custom_code_backend import CustomCodeBackend


def tgi_dialect(service: Service) -> Dialect:
    tgi = TgiService(service)
    v1 = TgiV1(tgi.options, service.options.chat_template)
    health = HealthHandler(service).handle
    information = InformationHandler(tgi)
    tokens = TokenHandler(tgi, v1)

    def post(path: str, handler: Handler, what: str, *bodies: type) -> Route:
        return Route("POST", path, handler, f"{what} (TGI)", bodies=bodies, answers=_ANSWERS)

    def generates(
        path: str, decode: Callable[[bytes], Job], *bodies: type, what: str = "generate"
    ) -> Route:
        return post(path, GenerateHandler(tgi, decode).handle, what, *bodies)

    def get(path: str, handler: Handler, what: str, *answers: str, is_open: bool = False) -> Route:
        return Route("GET", path, handler, what, is_open=is_open, answers=answers)

    json_type = "application/json"
    any_body = (CompatBody, ChatBody, CompletionBody)
    routes = (
        generates("/", decode_compat, CompatBody),
        generates("/generate", partial(decode_generate, streams=False), GenerateBody),
        generates("/generate_stream", partial(decode_generate, streams=True), GenerateBody),
        generates("/invocations", v1.any, *any_body),
        generates("/v1/chat/completions", v1.chat, ChatBody, what="chat"),
        generates("/v1/completions", v1.completion, CompletionBody, what="complete a text"),
        get("/v1/models", information.models, "models (TGI)", json_type),
        post("/tokenize", tokens.tokenize, "tokens of a text", GenerateBody),
        post("/chat_tokenize", tokens.chat_tokenize, "tokens of a chat", ChatBody),
        get("/info", information.info, "limits (TGI)", json_type, is_open=True),
        *(
            replace(get(path, health, "health", is_open=True), is_server_wide=True)
            for path in ("/", "/health", "/ping")
        ),
        get("/metrics", information.metrics, "Prometheus metrics, also TGI's", "text/plain"),
        openapi_route(),
        openapi_route("/api-doc/openapi.json"),
    )
    # TGI lets pages of any site call. A model's own code isn't for them.
    is_asked_for = service.options.api == "tgi"
    return Dialect(
        name="tgi",
        routes=routes,
        error=tgi_errors.reply,
        errors=_ERRORS,
        has_open_calls=is_asked_for and not isinstance(service.backend, CustomCodeBackend),
    )


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
    """What this dialect's handlers share."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.options = service.options.tgi
        self.protocol = TgiProtocol(self.options, service.backend, service.adapter_names)
        self.permits = Permits(self.options.max_concurrent_requests)
        self.metrics = TgiMetrics()
        self._call_numbers = itertools.count()

    async def read_json(self, request: web.Request) -> bytes:
        """A body that claims to be JSON."""
        check_content_type(request.headers.get("Content-Type", ""))
        return await self.service.admission.read_body(request)

    async def generate(self, request: web.Request, job: Job) -> web.StreamResponse:
        """Check, run and answer. Once a stream is asked for, errors are events of it."""
        meter = request[METER]
        try:
            with self.permits.take(self.protocol.num_sequences(job)):
                validation_started = meter.seconds
                # Clients may reuse their ids at the same time; the engine's must be unique.
                request_id = f"{meter.request_id}-{next(self._call_numbers)}"
                plan = await self.protocol.plan(job, request_id=request_id, started_s=meter.started)
                backend: Generator = self.service.backend
                fallback = await self.protocol.fallback(job, request_id)
                if fallback is not None:
                    backend = ToolRun(backend, salted(request, fallback), job.on_text)
                validation_seconds = meter.seconds - validation_started
                watched = WatchedRenderer(plan.renderer)
                response = await respond(
                    request,
                    backend,
                    replace(plan, renderer=watched),
                    meter,
                    send_timeout_s=self.service.options.send_timeout_s,
                    limits=self.service.options.limits,
                )
        except LmiError as error:
            self.metrics.fail(error)
            if not job.streams:
                raise
            return web.Response(
                body=job.render_error(error, self.options.version),
                headers={**self.protocol.headers(job), "Content-Type": "text/event-stream"},
            )
        except (asyncio.CancelledError, ConnectionError) as error:
            self.metrics.fail(error)
            raise
        if watched.failure is not None:
            self.metrics.fail(watched.failure)
        else:
            self.metrics.succeed(
                _record(plan, meter, validation_seconds), self.service.backend.info
            )
        return response


class WatchedRenderer(Renderer):
    """Another renderer, that remembers the error which ended its stream."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.streams = renderer.streams
        self.content_type = renderer.content_type
        self.starts_at_once = renderer.starts_at_once
        self.keep_alive = renderer.keep_alive
        self.failure: Exception | None = None

    def headers(self) -> Mapping[str, str]:
        return self._renderer.headers()

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        return self._renderer.feed(index, events)

    def finish(self) -> bytes:
        return self._renderer.finish()

    def error(self, error: Exception) -> bytes:
        self.failure = error
        return self._renderer.error(error)


def _record(plan: Plan, meter: RequestMeter, validation_seconds: float) -> RequestRecord:
    limits = [request.params.max_new_tokens or 0 for request in plan.requests]
    return RequestRecord(
        seconds=meter.seconds,
        validation_seconds=validation_seconds,
        queue_seconds=meter.queue_seconds,
        num_prompt_tokens=meter.num_prompt_tokens,
        max_new_tokens=max(limits),
        num_generated_tokens=meter.num_generated_tokens,
    )


class GenerateHandler:
    """A route that generates, by the function that decodes its bodies."""

    def __init__(self, tgi: TgiService, decode: Callable[[bytes], Job]) -> None:
        self._tgi = tgi
        self._decode = decode

    async def handle(self, request: web.Request) -> web.StreamResponse:
        tgi = self._tgi
        with tgi.service.admission.enter():
            tgi.service.loop_lag.wake()
            tgi.metrics.begin()
            body = await tgi.read_json(request)
            try:
                job = await read_body(tgi.service, request, self._decode, body)
            except LmiError as error:
                tgi.metrics.fail(error)
                raise
            return await tgi.generate(request, job)


class HealthHandler:
    """200 and no body while every engine works."""

    def __init__(self, service: Service) -> None:
        self._models = service.models

    async def handle(self, request: web.Request) -> web.Response:
        if not all(model.takes_requests for model in self._models):
            raise HttpError(503, "healthcheck", "unhealthy")
        return web.Response(content_type="text/plain")


class InformationHandler:
    """What is served, and its limits."""

    def __init__(self, tgi: TgiService) -> None:
        self._tgi = tgi

    async def info(self, request: web.Request) -> web.Response:
        """Release 2 also names the model's type and the capacity."""
        options, limits = self._tgi.options, self._tgi.protocol.limits
        runner = self._tgi.service.backend.info.runner
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

    async def metrics(self, request: web.Request) -> web.Response:
        """TGI's metrics, then those that every dialect has."""
        service = self._tgi.service
        text = self._tgi.metrics.render(service.backend.info, service.backend.stats())
        body = text + service.metrics.render()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def models(self, request: web.Request) -> web.Response:
        """The model's id, as TGI has it; of several models, the names that requests may use."""
        served = self._tgi.service.models
        names = {self._tgi.options.model_id: None}
        if served.sole is None:
            names = dict.fromkeys(model.name for model in served if model.endpoint is not None)
        data = [{"id": n, "object": "model", "created": 0, "owned_by": n} for n in names]
        return web.json_response({"object": "list", "data": data}, dumps=_compact)


class TokenHandler:
    """Tokens without generating."""

    def __init__(self, tgi: TgiService, v1: TgiV1) -> None:
        self._tgi = tgi
        self._v1 = v1

    async def tokenize(self, request: web.Request) -> web.Response:
        with self._tgi.service.admission.enter():
            service = self._tgi.service
            text = await read_body(service, request, _inputs, await self._tgi.read_json(request))
            spans = await service.backend.tokenizer.spans(text)
            body = await rendered(partial(token_array, text, spans), len(spans))
        return web.Response(body=body, content_type="application/json")

    async def chat_tokenize(self, request: web.Request) -> web.Response:
        with self._tgi.service.admission.enter():
            service = self._tgi.service
            body = await self._tgi.read_json(request)
            text = await read_body(service, request, self._v1.chat_text, body)
            spans = await service.backend.tokenizer.spans(text, add_special_tokens=False)
            body = await rendered(partial(chat_tokens, text, spans), len(spans))
        return web.Response(body=body, content_type="application/json")


def _inputs(body: bytes) -> str:
    return _decode_generate_body(body).inputs


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
