"""Our interface as an OpenAPI document, made from the routes and the schemas that decode bodies."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import web

from lmi_core.version import __version__
from lmi_server.dialects.routes import Route, ServerRoute
from lmi_server.dialects.table import Dialect, DialectTable
from lmi_server.models.model_registry import ModelRegistry

TABLE = web.AppKey("dialect_table", DialectTable)
"""Whose routes the document describes."""

_documents: WeakKeyDictionary[DialectTable, bytes] = WeakKeyDictionary()
_VARIABLE = re.compile(r"\{(?P<name>\w+)(?::[^}]*)?\}")
_OPERATION_ID = re.compile(r"\W+", re.ASCII)


def openapi_route(path: str = "/openapi.json") -> ServerRoute:
    return ServerRoute(
        "GET",
        path,
        _answer,
        "this interface (OpenAPI)",
        answers=("application/json",),
    )


async def _answer(request: web.Request, models: ModelRegistry) -> web.Response:
    table = request.app[TABLE]
    if table not in _documents:  # hundreds of schemas take longer than a request may
        _documents[table] = await asyncio.to_thread(_rendered, table)
    return web.Response(body=_documents[table], content_type="application/json")


def _rendered(table: DialectTable) -> bytes:
    return json.dumps(document(table)).encode()


def document(table: DialectTable) -> dict[str, Any]:
    """The routes without prefixes, as OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for dialect, route in table.owned_routes():
        path = _VARIABLE.sub(r"{\g<name>}", route.path)
        paths.setdefault(path, {})[_method(route)] = _operation(dialect, route, path)
        schemas |= _components(dialect, route)
    owners = {dialect.name: dialect for dialect, _ in table.owned_routes()}
    schemas |= {_error_name(dialect): dict(dialect.errors.schema) for dialect in owners.values()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Large-model inference server", "version": __version__},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _method(route: Route) -> str:
    """Routes for any method are shown under the one that clients use."""
    if route.method == "*":
        return "post" if route.bodies else "get"
    return route.method.lower()


def _operation(dialect: Dialect, route: Route, path: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.purpose,
        "operationId": _OPERATION_ID.sub("_", f"{dialect.name}_{_method(route)}{path}").strip("_"),
        "tags": [dialect.name],
        "responses": {"200": _success(route), **dict(_failures(dialect))},
    }
    if names := [match["name"] for match in _VARIABLE.finditer(path)]:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if route.bodies:
        schemas, _ = _body_schemas(dialect, route)
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if not route.is_open:
        operation["security"] = [{}, {"key": []}]
    return operation


def _success(route: Route) -> dict[str, Any]:
    content: Mapping[str, Any] = {content_type: {} for content_type in route.answers}
    return {"description": route.purpose} | ({"content": content} if content else {})


def _failures(dialect: Dialect) -> Iterator[tuple[str, dict[str, Any]]]:
    errors = dialect.errors
    schema = {"$ref": f"#/components/schemas/{_error_name(dialect)}"}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if errors.has_text:
        content["text/plain"] = {}
    for status, description in errors.statuses.items():
        yield str(status), {"description": description, "content": content}


def _components(dialect: Dialect, route: Route) -> dict[str, Any]:
    _, components = _body_schemas(dialect, route)
    return {f"{dialect.name}.{name}": schema for name, schema in components.items()}


def _body_schemas(
    dialect: Dialect, route: Route
) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    template = f"#/components/schemas/{dialect.name}.{{name}}"
    return msgspec.json.schema_components(route.bodies, ref_template=template)


def _error_name(dialect: Dialect) -> str:
    return f"{dialect.name}.Error"
