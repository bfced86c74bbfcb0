"""Models that requests bring: one that isn't served is loaded from the ``model_url`` they name.

Only where ``model_url_pattern`` is set, and only from URLs that match it as a whole (LMI format
reference, 3.3). The first request waits for the model, others of that name wait with it; a model
that can't be loaded leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from lmi_core.errors import LmiError
from lmi_server.dialects.base import HttpError
from lmi_server.management.output import load_error
from lmi_server.models.model import ServedModel
from lmi_server.models.model_registry import ModelRegistry, Registrar

URL = "model_url"
_ARGUMENTS = {"engine_name": "engine", "device": "device"}
"""Properties of a request, and the parameters of a registration that they are."""


class RequestedModels:
    """Loads each model once, however many requests ask for it at the same time."""

    def __init__(self, models: ModelRegistry, registrar: Registrar) -> None:
        self._models = models
        self._registrar = registrar
        self._arriving: dict[tuple[str, str | None], asyncio.Future[ServedModel]] = {}

    @classmethod
    def of(cls, models: ModelRegistry) -> RequestedModels | None:
        """None where no request may bring a model."""
        registrar = models.registrar
        if registrar is None or not registrar.loads_on_request:
            return None
        return cls(models, registrar)

    def is_arriving(self, model: ServedModel) -> bool:
        """Whether a request has brought the model and waits for it."""
        return (model.name, model.version) in self._arriving

    async def arrive(
        self, name: str, version: str | None, properties: Mapping[str, str]
    ) -> ServedModel:
        """The model, loaded from where the request's properties say; HttpError."""
        key = (name, version)
        if key not in self._arriving:
            url = properties.get(URL)
            if not url:
                message = f"Parameter {URL} is required."
                raise HttpError(404, "ModelNotFoundException", message)
            arguments = {"url": url, "model_name": name}
            if version is not None:
                arguments["model_version"] = version
            for given, parameter in _ARGUMENTS.items():
                if given in properties:
                    arguments[parameter] = properties[given]
            arriving = asyncio.ensure_future(self._load(arguments))
            self._arriving[key] = arriving
            arriving.add_done_callback(lambda _: self._arriving.pop(key))
        # Whoever leaves doesn't end it for the others.
        return await asyncio.shield(self._arriving[key])

    async def _load(self, arguments: Mapping[str, str]) -> ServedModel:
        try:
            recipe = await self._registrar.requested_recipe(arguments)
            if self._models.has(recipe.name, recipe.version):
                message = f"Model is not ready: {recipe.name}"
                raise HttpError(503, "WlmException", message)
            model = self._models.add(recipe)
            await self._models.load(model, keep_failed=False)
        except (LmiError, MemoryError, OSError) as error:
            raise load_error(error) from error
        return model
