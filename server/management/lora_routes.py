"""Loading and unloading adapters in vLLM's form, for the model of the start.

vLLM has these routes only where its environment allows changes while it serves; here they are
management, as the others that do the same.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from lmi_core.errors import LmiError, UserError
from lmi_server.dialects.base import HttpError
from lmi_server.dialects.decode import decode_json
from lmi_server.dialects.openai.errors import ModelNotFound
from lmi_server.dialects.routes import ServerRoute, management_route
from lmi_server.management.adapters import check_name, model_of, registrar_of
from lmi_server.management.input import MAX_BODY_BYTES
from lmi_server.models.model import ServedModel
from lmi_server.models.model_adapters import Adapter
from lmi_server.models.model_registry import ModelRegistry


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


async def load(request: web.Request, models: ModelRegistry) -> web.Response:
    """Answers once requests may name the adapter."""
    body = decode_json(_LOAD, await models.admission.read_body(request, MAX_BODY_BYTES))
    name, src = body.lora_name, body.lora_path
    if not name or not src:
        raise UserError("Both 'lora_name' and 'lora_path' must be provided.", field="lora_name")
    check_name(name)
    model = model_of(request, models)
    if model.adapters.get(name) is not None:
        await _replace(model, name, body.load_inplace)
    try:
        path = registrar_of(models).adapter_path(src, model.recipe.url)
        await model.adapters.register(Adapter(name=name, src=src, path=path))
    except UserError as error:
        raise UserError(str(error), field=error.field or "lora_path") from error
    except (LmiError, MemoryError, OSError) as error:
        raise HttpError(500, "InternalServerError", str(error)) from error
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def _replace(model: ServedModel, name: str, is_allowed: bool) -> None:
    if not is_allowed:
        raise UserError(
            f"The lora adapter '{name}' has already been loaded. If you want to load the "
            "adapter in place, set 'load_inplace' to True.",
            field="lora_name",
        )
    await model.adapters.unregister(name)


async def unload(request: web.Request, models: ModelRegistry) -> web.Response:
    """Answers once running requests with the adapter have ended."""
    body = decode_json(_UNLOAD, await models.admission.read_body(request, MAX_BODY_BYTES))
    name = body.lora_name
    model = model_of(request, models)
    if model.adapters.get(name) is None:
        raise ModelNotFound(name, "it is no lora adapter that was loaded")
    await model.adapters.unregister(name)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


LORA_ROUTES: tuple[ServerRoute, ...] = tuple(
    management_route("POST", path, answer, purpose, bodies=(body,), answers=("text/plain",))
    for path, answer, purpose, body in (
        ("/v1/load_lora_adapter", load, "load an adapter (vLLM)", LoadBody),
        ("/v1/unload_lora_adapter", unload, "unload an adapter (vLLM)", UnloadBody),
    )
)
