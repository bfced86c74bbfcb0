"""TGI's chat and completion bodies as generations (its router/src/lib.rs).

Beyond TGI, since OpenAI's clients send them: ``stop`` may be one string, ``logit_bias`` may be
OpenAI's map, and ``presence_penalty`` has OpenAI's meaning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from lmi_core.errors import ModelError, UserError
from lmi_core.text.chat import ChatTemplate
from lmi_server.dialects.base import ANY_MODEL
from lmi_server.dialects.decode import Messages
from lmi_server.dialects.tgi.errors import TgiError
from lmi_server.dialects.tgi.grammar import plain_response_format
from lmi_server.dialects.tgi.options import TgiOptions
from lmi_server.dialects.tgi.schema import U32, U64, GenerateParameters, body_decoder, check_u64
from lmi_server.dialects.tgi.tools import TgiTools, tgi_tools

NonEmptyPrompts = Annotated[list[str], msgspec.Meta(min_length=1)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool


class V1Body(msgspec.Struct, frozen=True, kw_only=True):
    """What chats and completions have in common; unknown fields are ignored."""

    model: str | None = None
    """An adapter; what is none is the base model, whatever it says."""
    max_tokens: U32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    seed: U64 | None = None
    stop: list[str] | str | None = None
    stream: bool = False
    max_queue_s: float | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def adapter(self) -> str:
        """What may be an adapter's name."""
        return "" if self.model is None or self.model in ANY_MODEL else self.model

    def sampling(self) -> dict[str, Any]:
        """The fields of GenerateParameters; without a temperature of 0, text is sampled."""
        is_greedy = self.temperature == 0
        return {
            "temperature": None if is_greedy else self.temperature,
            "do_sample": not is_greedy,
            "top_p": self.top_p,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "max_queue_s": self.max_queue_s,
            "stop": self.stops,
            "details": True,
        }


class ChatBody(V1Body, frozen=True, kw_only=True):
    messages: Messages
    max_completion_tokens: U32 | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | list[float] | None = None
    logprobs: bool | None = None
    top_logprobs: U32 | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    tool_prompt: str | None = None
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        check_u64(seed=self.seed)
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("duplicate field `max_tokens`")
        for message in self.messages:
            _check_message(message)
        plain_response_format(self.response_format)

    @property
    def includes_usage(self) -> bool:
        options = self.stream_options
        return not isinstance(options, msgspec.UnsetType) and options.include_usage


class CompletionBody(V1Body, frozen=True, kw_only=True):
    prompt: str | NonEmptyPrompts
    suffix: str | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        check_u64(seed=self.seed)

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


decode_chat = body_decoder(ChatBody)
decode_completion = body_decoder(CompletionBody)


def chat_tools(body: ChatBody) -> TgiTools | None:
    """The tools that may be called; TgiError for those that TGI refuses."""
    grammar = plain_response_format(body.response_format)
    return tgi_tools(
        body.tools, body.tool_choice, body.tool_prompt, has_grammar=grammar is not None
    )


def chat_parameters(
    body: ChatBody, version: int, tools: TgiTools | None = None
) -> GenerateParameters:
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return GenerateParameters(
        max_new_tokens=_limit(limit, version),
        top_n_tokens=body.top_logprobs if body.logprobs else None,
        grammar=plain_response_format(body.response_format) if tools is None else tools.grammar,
        **body.sampling(),
    )


def completion_parameters(body: CompletionBody, version: int) -> GenerateParameters:
    return GenerateParameters(
        max_new_tokens=_limit(body.max_tokens, version),
        repetition_penalty=body.repetition_penalty,
        **body.sampling(),
    )


def check_completion(body: CompletionBody, options: TgiOptions) -> None:
    """TgiError for what TGI refuses before anything else."""
    if body.suffix is not None:
        message = "Suffix is not supported and can be achieved by preprocessing the prompt."
        raise TgiError(message, "suffix not supported")
    if len(body.prompts) > options.max_client_batch_size:
        limit = options.max_client_batch_size
        message = f"Number of prompts exceeds the maximum allowed batch size of {limit}"
        raise TgiError(message, "batch size exceeded")


def render_chat(
    body: ChatBody, template: ChatTemplate | None, tools: TgiTools | None = None
) -> str:
    """The prompt; TgiError when the template is at fault.

    A last message of the assistant is left open for the model to go on with.
    """
    if template is None:
        raise _template_error("template not found")
    messages = [_plain(message) for message in body.messages]
    is_open = bool(messages) and messages[-1].get("role") == "assistant"
    try:
        if tools is not None:
            in_template = template.takes_tools
            if messages and body.messages[-1].get("content") is not None:
                messages[-1]["content"] += tools.suffix(in_template=in_template)
            offered = tools.described() if in_template else None
        else:
            offered = None
        return template.render(
            messages, add_generation_prompt=True, continue_final_message=is_open, tools=offered
        )
    except (UserError, ModelError) as error:
        raise _template_error(str(error)) from None


def logit_bias(body: ChatBody) -> tuple[tuple[int, float], ...]:
    """OpenAI's map; TGI's own list of numbers has no effect there either."""
    if not isinstance(body.logit_bias, Mapping):
        return ()
    if not all(name.isdecimal() and len(name) <= 10 for name in body.logit_bias):
        raise UserError("the keys of `logit_bias` must be token ids", field="logit_bias")
    return tuple((int(name), bias) for name, bias in body.logit_bias.items())


def _template_error(reason: str) -> TgiError:
    return TgiError(f"Template error: {reason}", "template_error")


def _limit(asked: int | None, version: int) -> int | None:
    return 100 if asked is None and version < 3 else asked


def _check_message(message: Mapping[str, Any]) -> None:
    if not isinstance(message.get("role"), str):
        raise ValueError("missing field `role` of a message")
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise ValueError("a part of a message's `content` is not a text")
    elif content is None:
        if not isinstance(message.get("tool_calls"), list):
            raise ValueError("missing field `content` of a message")
    elif not isinstance(content, str):
        raise ValueError("invalid type of a message's `content`, expected string or sequence")


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Role and text: nothing else of a message reaches the template."""
    content = message.get("content")
    if content is None:
        content = msgspec.json.encode(message["tool_calls"]).decode()
    elif not isinstance(content, str):
        content = _join(content)
    return {"role": message["role"], "content": content}


def _join(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)
