"""Long answers are written off the loop, and sent a piece at a time, as fast as they are read."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

from lmi_core.engine.request import GenerationRequest
from lmi_server.http.metrics import RequestMeter

_PIECE_BYTES = 1 << 20


def body_of(data: bytes | None) -> bytes | LongBody | None:
    """What a response is given as its body: one that is long would be copied at once, twice."""
    return data if data is None or len(data) <= _PIECE_BYTES else LongBody(data)


def num_items(requests: Sequence[GenerationRequest], meter: RequestMeter) -> int:
    """About how many tokens, with the likeliest in their places, and vectors an answer names."""
    params = requests[0].params
    num_prompt = meter.num_prompt_tokens if names_prompts(requests[0]) else 0
    num_ranked = max(params.logprobs or 0, params.prompt_logprobs or 0)
    return len(requests) + (meter.num_generated_tokens + num_prompt) * (1 + num_ranked)


def names_prompts(request: GenerationRequest) -> bool:
    """Whether answers name the tokens of the prompt."""
    return request.echo or request.params.prompt_logprobs is not None


class LongBody(Payload):
    """Bytes, written in pieces. Its response says what type they are."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._size = len(data)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return str(self._value, encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        view = memoryview(self._value)
        for start in range(0, len(view), _PIECE_BYTES):
            await writer.write(view[start : start + _PIECE_BYTES])
