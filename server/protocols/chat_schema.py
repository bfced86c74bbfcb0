"""The request schema of chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError
from lmi_server.protocols.decode import decode_json

_TEMPERATURE_MAX = 2.0
_TOP_LOGPROBS_MAX = 20
_NUM_CHOICES_MAX = 128


class ChatBody(msgspec.Struct, frozen=True, kw_only=True):
    """A chat completion request; ``user``, ``model`` and what isn't named here is ignored."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def includes_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


_BODY = msgspec.json.Decoder(ChatBody)


def decode_chat(body: bytes) -> ChatBody:
    """Decode and check; UserError names the field at fault."""
    chat = decode_json(_BODY, body)
    if not chat.messages:
        raise UserError("messages is empty; send at least one message", field="messages")
    if chat.tools or chat.functions:
        raise UserError("tools are not available in this version; leave them out", field="tools")
    kind = (chat.response_format or {}).get("type", "text")
    if kind != "text":
        raise UserError(
            f"response_format {kind!r} is not available in this version; send text or leave it out",
            field="response_format",
        )
    _check_range("n", chat.n, 1, _NUM_CHOICES_MAX)
    _check_range("temperature", chat.temperature, 0.0, _TEMPERATURE_MAX)
    _check_range("presence_penalty", chat.presence_penalty, -2.0, 2.0)
    _check_range("frequency_penalty", chat.frequency_penalty, -2.0, 2.0)
    _check_range("top_logprobs", chat.top_logprobs, 0, _TOP_LOGPROBS_MAX)
    for bias in (chat.logit_bias or {}).values():
        _check_range("logit_bias value", bias, -100.0, 100.0)
    return chat


def plain_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose contents are strings, as most templates expect; text parts are joined."""
    return [_plain_message(index, message) for index, message in enumerate(messages)]


def chat_sampling_params(chat: ChatBody) -> SamplingParams:
    """Defaults are OpenAI's: temperature 1, as many tokens as fit."""
    max_new_tokens = (
        chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    )
    stop = (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ())
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=1.0 if chat.temperature is None else chat.temperature,
        top_p=1.0 if chat.top_p is None else chat.top_p,
        top_k=0 if chat.top_k in (None, -1) else chat.top_k or 0,
        min_p=chat.min_p or 0.0,
        n=1 if chat.n is None else chat.n,
        seed=chat.seed,
        stop=stop,
        stop_token_ids=tuple(chat.stop_token_ids or ()),
        ignore_eos=bool(chat.ignore_eos),
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        logit_bias=_logit_bias(chat.logit_bias or {}),
        presence_penalty=chat.presence_penalty or 0.0,
        frequency_penalty=chat.frequency_penalty or 0.0,
        repetition_penalty=1.0 if chat.repetition_penalty is None else chat.repetition_penalty,
    )


def _plain_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str) or "content" not in message:
        raise UserError(f"{where} needs a role and a content", field=where)
    content = message["content"]
    if isinstance(content, list):
        content = "\n".join(_text_of(f"{where}.content[{i}]", p) for i, p in enumerate(content))
    elif content is not None and not isinstance(content, str):
        raise UserError(
            f"{where}.content must be a string or a list of parts, got {type(content).__name__}",
            field=f"{where}.content",
        )
    return {**message, "content": content or ""}


def _text_of(where: str, part: object) -> str:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise UserError(f"{where} is {kind!r}; only text parts are available", field=where)


def _logit_bias(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for name in biases:
        if not name.isdecimal() or len(name) > 10:
            raise UserError(
                f"logit_bias has the key {name[:40]!r}; keys are token ids", field="logit_bias"
            )
    return tuple((int(name), bias) for name, bias in biases.items())


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise UserError(f"{name} must be between {low:g} and {high:g}, got {value}", field=name)
