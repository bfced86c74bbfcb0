"""Which model answers a request.

By the path, else the query, else the properties (headers and custom attributes), else SageMaker's
target model, else the body: the field ``model_name`` of a form, or where the protocol has it the
``model`` of a JSON object. A request that names none is for the only model of the start.
(InferenceRequestHandler.java. DJL-Serving leaves the target header to SageMaker, which sends the
request to the model's own route; here it chooses as well.) That ``model`` may also be a model's
adapter.

A server with one model asks nothing: that model's own routes check the names they are given. With
``model_url_pattern`` a name that isn't served may come with the model (``requested_models.py``).
"""

from __future__ import annotations

from aiohttp import web

from lmi_core.config.sources.load_models import name_of
from lmi_core.errors import UserError
from lmi_server.dialects.base import ANY_MODEL, HttpError
from lmi_server.dialects.large_bodies import model_named
from lmi_server.dialects.openai.errors import ModelNotFound
from lmi_server.dialects.routes import Route, ServerRoute
from lmi_server.dialects.table import Dialect
from lmi_server.http.access import Handler
from lmi_server.http.form import form_items
from lmi_server.http.properties import request_properties
from lmi_server.http.refusals import Refusals
from lmi_server.models.model import ServedModel
from lmi_server.models.model_registry import ModelRegistry
from lmi_server.models.requested_models import RequestedModels

MODEL = web.RequestKey("model", ServedModel)
"""Set once a model is chosen; its dialects render the request's errors."""

_TARGET = "x-amzn-sagemaker-target-model"
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


class ModelChoice:
    """Chooses the model of a request."""

    def __init__(self, models: ModelRegistry) -> None:
        self._models = models
        self._requested = RequestedModels.of(models)

    @property
    def sole(self) -> ServedModel | None:
        """The model of every request, where there is nothing to choose."""
        return self._models.sole if self._requested is None else None

    async def choose(
        self, request: web.Request, dialect_name: str, *, names_in_body: bool
    ) -> ServedModel:
        """The model that a request names; HttpError or UserError where there is none."""
        name, version = _asked(request)
        model: ServedModel | None
        if name is not None:
            model = self._models.find(name, version)
            if model is not None and not self._is_arriving(model):
                return model
            if self._requested is not None and dialect_name == "lmi":
                given = {**request.query, **request_properties(request.headers)}
                return await self._requested.arrive(name, version, given)
            if model is None:
                raise self._unknown(name, version, dialect_name)
            return model
        if names_in_body:
            model = await self._named_in_body(request, version, dialect_name)
        else:
            model = await self._named_in_form(request, version)
        if model is not None:
            return model
        default = self._models.default
        if default is not None:
            return default
        if dialect_name == "tgi" and request.method == "GET" and (any_model := self._any()):
            return any_model  # /info and the like, which have no place for a name
        if dialect_name != "lmi":
            raise UserError(f"model is missing; {self._served()}", field="model")
        raise HttpError(400, "BadRequestException", "Parameter model_name is required.")

    async def _named_in_form(self, request: web.Request, version: str | None) -> ServedModel | None:
        content_type = request.headers.get("Content-Type", "")
        if not content_type.startswith(_FORMS):
            return None
        items = await form_items(content_type, await self._body(request)) or []
        name = dict(items).get("model_name", b"").decode("utf-8", "replace")
        if not name:
            return None
        model = self._models.find(name, version)
        if model is not None and not self._is_arriving(model):
            return model
        if self._requested is not None:
            fields = {key: value.decode("utf-8", "replace") for key, value in items}
            given = {**fields, **request_properties(request.headers)}
            return await self._requested.arrive(name, version, given)
        if model is None:
            raise self._unknown(name, version, "lmi")
        return model

    async def _body(self, request: web.Request) -> bytes:
        """The body, which the model's own route will find read."""
        admission = self._models.admission
        with admission.enter():
            return await admission.read_body(request)

    async def _named_in_body(
        self, request: web.Request, version: str | None, dialect_name: str
    ) -> ServedModel | None:
        """The model that a JSON body names. What can't be decoded is for any model to refuse."""
        name = await model_named(await self._body(request))
        if name is False:
            return self._any()
        if name is None:
            return None
        model = self._models.find(name, version) or self._models.with_adapter(name)
        # TGI has one model and takes any name for it.
        is_any = dialect_name == "tgi" or name in ANY_MODEL
        if model is None and (not is_any or self._models.default is None):
            raise self._unknown(name, version, dialect_name)
        return model

    def _is_arriving(self, model: ServedModel) -> bool:
        return self._requested is not None and self._requested.is_arriving(model)

    def _any(self) -> ServedModel | None:
        return next((model for model in self._models if model.loaded is not None), None)

    def _unknown(self, name: str, version: str | None, dialect_name: str) -> Exception:
        if dialect_name != "lmi":
            return ModelNotFound(name, self._served())
        full_name = name if version is None else f"{name}:{version}"
        return HttpError(
            404, "ModelNotFoundException", f"Model or workflow not found: {full_name[:200]}"
        )

    def _served(self) -> str:
        names = list(map(repr, dict.fromkeys(model.name for model in self._models)))
        verb = "is" if len(names) == 1 else "are"
        return f"{', '.join(names)} {verb} served here" if names else "no model is served here"


def handler_of(
    route: Route, dialect: Dialect, models: ModelRegistry, choice: ModelChoice
) -> Handler:
    """The handler that an application has for a route: of any model, which is chosen first."""
    if isinstance(route, ServerRoute):
        serve = route.answer

        async def answer(request: web.Request) -> web.StreamResponse:
            return await serve(request, models)

        return answer
    admission, error_rates = models.admission, models.error_rates
    names_in_body = dialect.name != "lmi" and route.method == "POST"

    async def answer_by_model(request: web.Request) -> web.StreamResponse:
        model = choice.sole
        if model is None:
            model = await choice.choose(request, dialect.name, names_in_body=names_in_body)
        elif route.bodies and request.method == "POST" and not request.match_info:
            # Others find out where they enter; here it is known before anything is looked at.
            wait_s = admission.wait_if_full()
            if wait_s is not None and model.loaded is not None:
                request[MODEL] = model
                error_rates.count_full()
                refusals, number = model.loaded.of(Refusals), admission.num_in_flight
                return refusals.response(request, dialect, number, wait_s)
        request[MODEL] = model
        with model.answering().in_use() as loaded:
            return await route.answer(request, loaded)

    return answer_by_model


def _asked(request: web.Request) -> tuple[str | None, str | None]:
    """Name and version as the path, the query or the headers give them."""
    path, query, properties = request.match_info, request.query, request_properties(request.headers)
    name = path.get("model") or query.get("model_name") or properties.get("model_name")
    if name is None and properties.get(_TARGET):
        name = name_of(properties[_TARGET])
    version = path.get("version") or query.get("model_version") or properties.get("model_version")
    return name, version
