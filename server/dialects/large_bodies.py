"""Bodies that take long to decode are decoded in a child; their long prompts are tokenized there.

Decoding holds the interpreter's lock: small objects cost a microsecond each, long strings a
nanosecond a byte. What comes back is bounded, so that the lock is never held for long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pickle import PickleBuffer
from typing import Any, Literal, TypeVar

import msgspec

from lmi_core.engine.request import GenerationRequest
from lmi_core.errors import UserError
from lmi_core.sandbox.pool import Limits, shared_pool
from lmi_core.text.metered_template import CostlyTemplateError, metered
from lmi_core.text.prompt_errors import prompt_too_long
from lmi_server.dialects.base import ParsedCall
from lmi_server.dialects.unknown_fields import collect_ignored, note_ignored
from lmi_server.models.loaded_model import LoadedModel
from lmi_server.models.stand_in import StandIn, stand_in_of

T = TypeVar("T")


class _Named(msgspec.Struct):
    model: Any = None


_NAMED = msgspec.json.Decoder(_Named)
_SMALL_BYTES = 64 * 1024
_LARGE_BYTES = 4 << 20
_MANY_ITEMS, _ITEMS_PER_OBJECT = 16_384, 4
"""A property of a JSON schema, an object of its own, takes 10 to 12 us until it is in a grammar."""
_MANY_RENDERED = 1024
_LONG_CHARS = 256 * 1024
"""A prompt of more characters is tokenized where it was decoded."""
_PROCESSOR_S = 10
_MAX_TOKEN_IDS = 2 << 20
_MAX_RESULT_BYTES = 32 << 20
_BYTES_PER_BYTE, _MAX_MEMORY_BYTES = 192, 3 << 30
"""Memory that a byte may take: an empty object of two bytes takes 64, a character that is being
tokenized up to 150. On top of 1 GiB; and how much it may be together."""


def is_large(body: bytes) -> bool:
    """Whether decoding would hold the loop: many bytes, or many items in not so few."""
    if len(body) <= _SMALL_BYTES:
        return False
    if len(body) > _LARGE_BYTES:
        return True
    return body.count(b",") + body.count(b"[") + _ITEMS_PER_OBJECT * body.count(b"{") > _MANY_ITEMS


async def rendered(render: Callable[[], bytes], num_items: int) -> bytes:
    """``render()``, in a thread for many items, of which it writes some at a time."""
    return render() if num_items <= _MANY_RENDERED else await asyncio.to_thread(render)


async def decoded(
    decode: Callable[[bytes], T], body: bytes, model: LoadedModel, *, beside: bytes = b""
) -> T:
    """``decode(body)``, in a child for a large body or a chat template that costs much: ``decode``
    must be something that can be pickled.

    ``beside``: what ``decode`` has to decode besides the body. In the child ``model`` is a
    ``StandIn``. Raises what ``decode`` raises, and UserError when it takes too much time or memory,
    or makes too much of the body.
    """
    if not (is_large(body) or is_large(beside)):
        try:
            with metered():
                return decode(body)
        except CostlyTemplateError:
            pass
    answer: tuple[T, list[str]] = await shared_pool().run(
        _decode_in_child,
        decode,
        PickleBuffer(body),
        model,
        limits=_limits(len(body), len(beside)),
        num_bytes=len(body) + len(beside),
        known=model,
        stand_in=stand_in_of(model),
    )
    value, ignored = answer
    note_ignored(ignored)
    return value


@contextmanager
def named_as(prompt_field: str) -> Iterator[None]:
    """Have errors about a prompt name what a body calls it."""
    try:
        yield
    except UserError as error:
        if error.field == "prompt":
            error.field = prompt_field
        raise


async def model_named(body: bytes) -> str | Literal[False] | None:
    """The field ``model`` of a JSON object; False where that isn't a text, or can't be decoded."""
    return await worked(_model_named, body)


async def worked(work: Callable[[bytes], T], body: bytes) -> T:
    """``work(body)``, in a child for a large body: something that can be pickled, for which no
    model is needed."""
    if not is_large(body):
        return work(body)
    limits = _limits(len(body))
    value: T = await shared_pool().run(work, PickleBuffer(body), limits=limits, num_bytes=len(body))
    return value


def _model_named(body: bytes) -> str | Literal[False] | None:
    try:
        name = _NAMED.decode(body).model
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return name if name is None or isinstance(name, str) else False


def _limits(num_bytes: int, num_beside: int = 0) -> Limits:
    memory_bytes = (1 << 30) + _BYTES_PER_BYTE * (num_bytes + num_beside)
    return Limits(
        what=f"reading a body of {num_bytes} bytes, with its chat template if it is a chat,",
        processor_s=_PROCESSOR_S,
        memory_bytes=min(memory_bytes, _MAX_MEMORY_BYTES),
        result_bytes=_MAX_RESULT_BYTES,
    )


def _decode_in_child(
    decode: Callable[[bytes], T], body: memoryview, stand_in: StandIn
) -> tuple[Any, list[str]]:
    """The result, and the names of the fields that were ignored."""
    ignored = collect_ignored()
    value: Any = decode(bytes(body))
    if isinstance(value, ParsedCall):
        with named_as(value.prompt_field):
            value = _bounded(value, stand_in)
    return value, ignored


def _bounded(parsed: ParsedCall, stand_in: StandIn) -> ParsedCall:
    """The call with long prompts as token ids; UserError when there are too many of them."""
    requests = tuple(
        _tokenized(request, parsed.truncate_prompt_tokens, stand_in) for request in parsed.requests
    )
    num_ids = sum(len(request.prompt_token_ids or ()) for request in requests)
    if num_ids > _MAX_TOKEN_IDS:
        raise UserError(
            f"the prompts have {num_ids} tokens; at most {_MAX_TOKEN_IDS} fit into one request",
            field="prompt",
        )
    info = stand_in.known_info
    if info is not None:
        for request in requests:
            request.params.validate(
                vocab_size=info.runner.vocab_size, max_logprobs=info.runner.max_logprobs
            )
    return replace(parsed, requests=requests)


def _tokenized(
    request: GenerationRequest, num_kept: int | None, stand_in: StandIn
) -> GenerationRequest:
    info = stand_in.known_info
    max_tokens = None if info is None else info.max_prompt_tokens
    token_ids = request.prompt_token_ids
    if request.pooling is not None:  # its texts are bounded, and may be cut
        return request
    if request.prompt is not None:
        if len(request.prompt) <= _LONG_CHARS or stand_in.known_tokenizer is None:
            return request
        limit = max_tokens if num_kept is None else None
        stand_in.tokenizer.refuse_longer(request.prompt, limit)
        token_ids = tuple(
            stand_in.tokenizer.encode_now(
                request.prompt, add_special_tokens=request.add_special_tokens, max_tokens=limit
            )
        )
    assert token_ids is not None
    if num_kept is not None:
        last = max_tokens if num_kept < 0 else num_kept
        token_ids = token_ids if last is None else token_ids[-last:]
    if max_tokens is not None and len(token_ids) > max_tokens:
        raise prompt_too_long(len(token_ids), max_tokens)
    return replace(request, prompt=None, prompt_token_ids=token_ids)
