"""Tokens of texts and texts of tokens, in the form of vLLM's routes."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from lmi_server.dialects.decode import decode_json
from lmi_server.dialects.openai.chat_schema import ChatBody, decode_chat
from lmi_server.dialects.openai.openai import OpenAIProtocol, check_content_type
from lmi_server.dialects.routes import Service


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """A text; a body with ``messages`` is a ChatBody instead."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class _Kind(msgspec.Struct, frozen=True):
    messages: Any = None
    return_token_strs: bool = False


_KIND = msgspec.json.Decoder(_Kind)
_TEXT = msgspec.json.Decoder(TokenizeBody)
_TOKENS = msgspec.json.Decoder(DetokenizeBody)


class TokenHandler:
    def __init__(self, service: Service, protocol: OpenAIProtocol) -> None:
        self._service = service
        self._protocol = protocol

    async def tokenize(self, request: web.Request) -> web.Response:
        with self._service.admission.enter():
            body = await self._read(request)
            kind = decode_json(_KIND, body)
            if kind.messages is not None:
                chat: ChatBody = decode_chat(body)
                self._protocol.adapter_named(chat.model)
                text, special = self._protocol.render_chat(chat), bool(chat.add_special_tokens)
            else:
                plain = decode_json(_TEXT, body)
                self._protocol.adapter_named(plain.model)
                text, special = plain.prompt, plain.add_special_tokens
            backend = self._service.backend
            ids = list(await backend.encode(text, add_special_tokens=special))
        names = [backend.decode((i,)) for i in ids] if kind.return_token_strs else None
        return web.json_response(
            {
                "count": len(ids),
                "max_model_len": backend.max_model_len,
                "tokens": ids,
                "token_strs": names,
            }
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        with self._service.admission.enter():
            body = decode_json(_TOKENS, await self._read(request))
        self._protocol.adapter_named(body.model)
        return web.json_response({"prompt": self._service.backend.decode(body.tokens)})

    async def information(self, request: web.Request) -> web.Response:
        """The tokenizer's configuration, as it came with the model."""
        return web.json_response(dict(self._service.backend.tokenizer.config))

    async def _read(self, request: web.Request) -> bytes:
        check_content_type(request.headers.get("Content-Type", ""))
        return await self._service.admission.read_body(request)
