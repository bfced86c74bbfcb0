"""A whole answer: the events of one choice put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmi_core.engine.make_request import Prompt
from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.engine.param_checks import check_int, wrong_type
from lmi_core.engine.pooling_params import PoolingParams
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, UserError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.text.chat import ChatTemplate
from lmi_core.weights.formats import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a model answered; ``str`` of it is the text."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop: str | int | None
    """The stop string or stop token id that ended it."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    logprobs: tuple[float, ...]
    """Of the tokens, natural logarithms, if they were asked for."""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, events: Iterable[TokenEvent]) -> Completion:
        """From all events of a request with one choice."""
        tokens = [event for event in events if event.prompt is None]
        last = tokens[-1]
        return cls(
            text="".join(event.text for event in tokens),
            token_ids=tuple(event.token_id for event in tokens if event.token_id >= 0),
            finish_reason=last.finish_reason,
            stop=last.stop,
            num_prompt_tokens=last.num_prompt_tokens,
            num_cached_tokens=last.num_cached_tokens,
            logprobs=tuple(event.logprob for event in tokens if event.logprob is not None),
        )


class Completing:
    """Whole answers, for what gives the events of requests."""

    config: EngineConfig

    def generate(
        self,
        prompt: Prompt | GenerationRequest,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> AsyncGenerator[TokenEvent, None]:
        raise NotImplementedError

    def generate_sync(
        self,
        prompt: Prompt | GenerationRequest,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Generator[TokenEvent, None, None]:
        raise NotImplementedError

    def _request(
        self,
        prompt: Prompt | GenerationRequest,
        params: SamplingParams | None,
        options: dict[str, Any],
    ) -> GenerationRequest:
        raise NotImplementedError

    async def complete(
        self,
        prompt: Prompt | GenerationRequest,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Completion:
        """The whole answer to a prompt; arguments and errors are those of ``generate``."""
        request = self._request(prompt, params, options)
        check_one_choice(request)
        return Completion.of([event async for event in self.generate(request)])

    async def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Completion:
        """The answer to a conversation (``role`` and ``content`` each) or to one message, by the
        model's chat template. Raises UserError where it has none."""
        prompt = await asyncio.to_thread(render_chat, self.config.model, messages)
        options.setdefault("add_special_tokens", False)  # the template writes them
        return await self.complete(prompt, params, **options)

    async def embed(
        self, prompt: Prompt, params: PoolingParams | None = None, **options: Any
    ) -> FloatArray:
        """The embedding of a text or of token ids, fp32 [n]; ``options`` are fields of
        GenerationRequest. Raises UserError for a model that generates or scores."""
        options["pooling"] = PoolingParams() if params is None else params
        [event] = [event async for event in self.generate(prompt, **options)]
        return pooled_of(event)

    async def score(self, query: str, text: str, *, raw: bool = False, **options: Any) -> float:
        """How well a text goes with a query, from 0 to 1, by a model that scores pairs; ``raw``:
        what its classifier says. Raises UserError for another model."""
        params = PoolingParams(text_pair=text, raw_score=raw)
        return float((await self.embed(query, params, **options))[0])

    def complete_sync(
        self,
        prompt: Prompt | GenerationRequest,
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Completion:
        """As ``complete``, for threads without an event loop (``own_loop`` only)."""
        request = self._request(prompt, params, options)
        check_one_choice(request)
        return Completion.of(self.generate_sync(request))

    def chat_sync(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **options: Any,
    ) -> Completion:
        """As ``chat``, for threads without an event loop (``own_loop`` only)."""
        options.setdefault("add_special_tokens", False)
        return self.complete_sync(render_chat(self.config.model, messages), params, **options)


def pooled_of(event: TokenEvent) -> FloatArray:
    """What the one event of a pooled prompt holds; EngineError where the request was aborted."""
    if event.pooled is None:
        raise EngineError("the request was aborted")
    return event.pooled


def check_one_choice(request: GenerationRequest) -> None:
    """UserError for a request whose answer isn't one text."""
    check_int("n", request.params.n, 1, 128)
    if request.params.n != 1:
        raise UserError(
            f"complete and chat return one choice, got n={request.params.n}; generate gives the "
            "events of several",
            field="n",
        )


def render_chat(directory: Path, messages: str | Sequence[Mapping[str, Any]]) -> str:
    """The prompt of a conversation, or of one message of the user, by the model's own template."""
    template = ChatTemplate.load(directory)
    if template is None:
        raise UserError(f"{directory} has no chat template; use complete", field="messages")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    is_list = isinstance(messages, Sequence) and len(messages) > 0
    if not is_list or not all(isinstance(each, Mapping) and "role" in each for each in messages):
        raise wrong_type(
            "messages", messages, "messages must be a text, or a list of dicts of role and content"
        )
    return template.render(messages)
