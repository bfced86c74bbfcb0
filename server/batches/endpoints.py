"""The routes that a line of a batch may ask: how each understands a body, and says what failed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple

from lmi_server.batches.lines import MESSAGES
from lmi_server.dialects.anthropic.errors import anthropic_error
from lmi_server.dialects.anthropic.protocol import parse_messages
from lmi_server.dialects.base import Call, ParsedCall, Reply
from lmi_server.dialects.generation import parse_call
from lmi_server.dialects.openai.embeddings import parse_embeddings
from lmi_server.dialects.openai.errors import openai_error
from lmi_server.dialects.openai.openai import parse_chat, parse_completion
from lmi_server.dialects.openai.responses import parse_response
from lmi_server.models.loaded_model import LoadedModel
from lmi_server.models.stand_in import DecodingModel


class Endpoint(NamedTuple):
    parse: Callable[[LoadedModel, str, Call], Awaitable[ParsedCall]]
    """For a tenant, by its name."""
    error: Callable[[Exception], Reply] = openai_error


def _endpoint(
    parse: Callable[[DecodingModel, Call], ParsedCall],
    error: Callable[[Exception], Reply] = openai_error,
) -> Endpoint:
    async def parse_of_tenant(model: LoadedModel, tenant: str, call: Call) -> ParsedCall:
        return await parse_call(model, partial(parse, model), call)

    return Endpoint(parse_of_tenant, error)


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": _endpoint(parse_chat),
    "/v1/completions": _endpoint(parse_completion),
    "/v1/embeddings": _endpoint(parse_embeddings),
    "/v1/responses": Endpoint(parse_response),
    MESSAGES: _endpoint(parse_messages, anthropic_error),
}
"""By their paths."""
OPENAI_ENDPOINTS = tuple(path for path in ENDPOINTS if path != MESSAGES)
