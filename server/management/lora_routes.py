"""Loading and unloading adapters in vLLM's form, for the model of the start.

vLLM has these routes only where its environment allows changes while it serves; here they are
management, as the others that do the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from lmi_core.errors import LmiError, UserError
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.decode import decode_json
from lmi_server.dialects.openai.errors import ModelNotFound
from lmi_server.dialects.routes import Route, Service
from lmi_server.management.adapters import AdapterHandler, check_name
from lmi_server.models.model_adapters import Adapter

if TYPE_CHECKING:
    from lmi_server.models.model import ServedModel


class LoadBody(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False


class UnloadBody(msgspec.Struct, frozen=True, kw_only=True):
    lora_name: str
    lora_int_id: int | None = None


_LOAD = msgspec.json.Decoder(LoadBody)
_UNLOAD = msgspec.json.Decoder(UnloadBody)


def lora_routes(service: Service) -> tuple[Route, ...]:
    handler = LoraHandler(service)

    def post(path: str, handle: object, purpose: str, body: type) -> Route:
        return Route(
            "POST",
            path,
            handle,  # type: ignore[arg-type]
            purpose,
            bodies=(body,),
            answers=("text/plain",),
            is_server_wide=True,
            is_management=True,
        )

    return (
        post("/v1/load_lora_adapter", handler.load, "load an adapter (vLLM)", LoadBody),
        post("/v1/unload_lora_adapter", handler.unload, "unload an adapter (vLLM)", UnloadBody),
    )


class LoraHandler:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._adapters = AdapterHandler(service)

    async def load(self, request: web.Request) -> web.Response:
        """Answers once requests may name the adapter."""
        body = decode_json(_LOAD, await self._service.admission.read_body(request))
        name, src = body.lora_name, body.lora_path
        if not name or not src:
            raise UserError("Both 'lora_name' and 'lora_path' must be provided.", field="lora_name")
        check_name(name)
        model = self._adapters.model_of(request)
        if model.adapters.get(name) is not None:
            await self._replace(model, name, body.load_inplace)
        try:
            path = self._adapters.registrar.adapter_path(src, model.recipe.url)
            await model.adapters.register(Adapter(name=name, src=src, path=path))
        except UserError as error:
            raise UserError(str(error), field=error.field or "lora_path") from error
        except (LmiError, MemoryError, OSError) as error:
            raise HttpError(500, "InternalServerError", str(error)) from error
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _replace(self, model: ServedModel, name: str, is_allowed: bool) -> None:
        if not is_allowed:
            raise UserError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
                field="lora_name",
            )
        await model.adapters.unregister(name)

    async def unload(self, request: web.Request) -> web.Response:
        """Answers once running requests with the adapter have ended."""
        body = decode_json(_UNLOAD, await self._service.admission.read_body(request))
        name = body.lora_name
        model = self._adapters.model_of(request)
        if model.adapters.get(name) is None:
            raise ModelNotFound(name, "it is no lora adapter that was loaded")
        await model.adapters.unregister(name)
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")
