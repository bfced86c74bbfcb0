"""Tokens of texts and texts of tokens, in the form of vLLM's routes."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from lmi_server.dialects.decode import decode_json
from lmi_server.dialects.generation import read_known
from lmi_server.dialects.large_bodies import rendered
from lmi_server.dialects.openai.chat_schema import ChatBody, decode_chat
from lmi_server.dialects.openai.openai import (
    adapter_named,
    check_content_type,
    render_chat,
)
from lmi_server.dialects.openai.schema import WITHIN
from lmi_server.dialects.routes import ModelRoute
from lmi_server.dialects.unknown_fields import log_ignored, unknown_fields
from lmi_server.http.long_body import body_of
from lmi_server.models.loaded_model import LoadedModel
from lmi_server.models.stand_in import DecodingModel


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


_PIECE = 4096
"""Tokens, or characters, that are written at once."""


class _Text(NamedTuple):
    """What is to be tokenized, and how."""

    text: str
    special: bool
    shows_strings: bool


def _text(model: DecodingModel, body: bytes) -> _Text:
    kind = decode_json(_KIND, body)
    if kind.messages is not None:
        chat: ChatBody = decode_chat(body)
        adapter_named(model, chat.model)
        known: type = ChatBody
        text, special = render_chat(model, chat), bool(chat.add_special_tokens)
    else:
        plain = decode_json(_TEXT, body)
        adapter_named(model, plain.model)
        known = TokenizeBody
        text, special = plain.prompt, plain.add_special_tokens
    _log_unknown(body, known)
    return _Text(text, special, kind.return_token_strs)


def _log_unknown(body: bytes, kind: type) -> None:
    known = (*kind.__struct_fields__, "return_token_strs")  # type: ignore[attr-defined]
    log_ignored("a request's", unknown_fields(body, known, WITHIN))


def _decoded_text(model: DecodingModel, body: bytes) -> str:
    decoded_body = decode_json(_TOKENS, body)
    adapter_named(model, decoded_body.model)
    _log_unknown(body, DetokenizeBody)
    return model.decode(decoded_body.tokens)


def _answer(model: LoadedModel, ids: list[int], *, shows_strings: bool) -> bytes:
    pieces = [ids[start : start + _PIECE] for start in range(0, len(ids), _PIECE)]
    tokens = ", ".join(json.dumps(piece)[1:-1] for piece in pieces)
    strings = "null"
    if shows_strings:
        names = (json.dumps([model.decode((i,)) for i in piece])[1:-1] for piece in pieces)
        strings = f"[{', '.join(names)}]"
    head = f'"count": {len(ids)}, "max_model_len": {model.max_model_len}'
    return f'{{{head}, "tokens": [{tokens}], "token_strs": {strings}}}'.encode()


async def tokenize(request: web.Request, model: LoadedModel) -> web.Response:
    with model.admission.enter():
        body = await _read(request, model)
        decode = partial(_text, model)
        asked = await read_known(request, model, decode, body)
        special = asked.special
        ids = list(await model.tokenizes.encode(asked.text, add_special_tokens=special))
        answer = partial(_answer, model, ids, shows_strings=asked.shows_strings)
        data = await rendered(answer, len(ids))
    return web.Response(body=body_of(data), content_type="application/json")


async def detokenize(request: web.Request, model: LoadedModel) -> web.Response:
    with model.admission.enter():
        body = await _read(request, model)
        decode = partial(_decoded_text, model)
        text = await read_known(request, model, decode, body)
        data = await rendered(partial(_prompt, text), len(text) // _PIECE)
    return web.Response(body=body_of(data), content_type="application/json")


def _prompt(text: str) -> bytes:
    pieces = (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))
    return f'{{"prompt": "{"".join([json.dumps(piece)[1:-1] for piece in pieces])}"}}'.encode()


async def information(request: web.Request, model: LoadedModel) -> web.Response:
    """The tokenizer's configuration, as it came with the model."""
    return web.json_response(dict(model.tokenizer.config))


async def _read(request: web.Request, model: LoadedModel) -> bytes:
    check_content_type(request.headers.get("Content-Type", ""))
    return await model.admission.read_body(request)


_JSON = ("application/json",)
TOKEN_ROUTES = (
    ModelRoute("GET", "/tokenizer_info", information, "tokenizer", answers=_JSON),
    ModelRoute(
        "POST",
        "/tokenize",
        tokenize,
        "token ids of a text or chat",
        bodies=(TokenizeBody, ChatBody),
        answers=_JSON,
    ),
    ModelRoute(
        "POST",
        "/detokenize",
        detokenize,
        "text of token ids",
        bodies=(DetokenizeBody,),
        answers=_JSON,
    ),
)
