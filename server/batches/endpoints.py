"""The routes that a line of a batch may ask: how each understands a body, and says what failed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from lmi_server.batches.lines import MESSAGES
from lmi_server.dialects.anthropic.errors import anthropic_error
from lmi_server.dialects.anthropic.protocol import MessagesProtocol
from lmi_server.dialects.base import Call, ParsedCall, Reply
from lmi_server.dialects.generation import Parse, parse_call
from lmi_server.dialects.openai.embeddings import pooling_protocol
from lmi_server.dialects.openai.errors import openai_error
from lmi_server.dialects.openai.openai import openai_protocol
from lmi_server.dialects.openai.responses import parse_response
from lmi_server.models.loaded_model import LoadedModel


class Endpoint(NamedTuple):
    parse: Callable[[LoadedModel, str, Call], Awaitable[ParsedCall]]
    """For a tenant, by its name."""
    error: Callable[[Exception], Reply] = openai_error


def _endpoint(
    parse_of: Callable[[LoadedModel], Parse], error: Callable[[Exception], Reply] = openai_error
) -> Endpoint:
    async def parse(model: LoadedModel, tenant: str, call: Call) -> ParsedCall:
        return await parse_call(model, parse_of(model), call)

    return Endpoint(parse, error)


ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": _endpoint(lambda model: model.of(openai_protocol).parse_chat),
    "/v1/completions": _endpoint(lambda model: model.of(openai_protocol).parse_completion),
    "/v1/embeddings": _endpoint(lambda model: model.of(pooling_protocol).parse_embeddings),
    "/v1/responses": Endpoint(parse_response),
    MESSAGES: _endpoint(lambda model: model.of(MessagesProtocol).parse, anthropic_error),
}
"""By their paths."""
OPENAI_ENDPOINTS = tuple(path for path in ENDPOINTS if path != MESSAGES)
