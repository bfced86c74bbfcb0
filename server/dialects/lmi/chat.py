"""Chats on LMI's routes: OpenAI's objects, in lines unless the client accepts events."""

from __future__ import annotations

from lmi_core.errors import UserError
from lmi_server.dialects.base import Call, ParsedCall, Renderer
from lmi_server.dialects.lmi.adapters import adapter_of_call
from lmi_server.dialects.lmi.chat_output import chat_renderer
from lmi_server.dialects.lmi.output import error_body
from lmi_server.dialects.lmi.schema import LmiBody
from lmi_server.dialects.openai.chat_output import ChatRenderer, ChatStreamRenderer
from lmi_server.dialects.openai.chat_schema import (
    ChatBody,
    chat_prompt,
    chat_request,
    chat_sampling_params,
    decode_chat,
    echoed_text,
    form_of,
    tools_of,
)
from lmi_server.dialects.openai.chat_tools import AnswerForm
from lmi_server.dialects.openai.schema import WITHIN
from lmi_server.dialects.unknown_fields import report_fields
from lmi_server.models.stand_in import DecodingModel


def parse_chat(model: DecodingModel, call: Call, body: LmiBody) -> ParsedCall:
    """``body``: the call's, decoded as far as all of LMI's are."""
    release, model_name = model.options.lmi.release, model.options.model_name
    if release is not None and not release.has_chat:
        raise UserError(
            f"messages came with LMI 0.27, but option.lmi_compat is {release}; send inputs instead",
            field="messages",
        )
    chat = decode_chat(call.body)
    template = model.options.chat_template
    if template is None:
        raise UserError(
            f"The model {model_name} has no chat template; send inputs instead",
            field="messages",
        )
    tools = tools_of(chat, template)
    prompt = chat_prompt(chat, template)
    form = None
    if release is None:
        form = form_of(chat, template, tools, prompt)
    params = chat_sampling_params(chat, form)
    adapter = adapter_of_call(model, body.adapters, call, chat.model)
    answer_id = f"chatcmpl-{call.request_id}"
    if release is None:
        renderer = _renderer(call, chat, answer_id, adapter or model_name, params.n, form)
    elif tools is not None:
        raise UserError(
            f"LMI {release} has no form for tool calls (option.lmi_compat); leave tools "
            "out, or send tool_choice: none",
            field="tools",
        )
    else:
        renderer = chat_renderer(chat, answer_id, params.n, release)
    request = chat_request(call.request_id, chat, prompt, params, adapter)
    renderer.headers = report_fields(call, (*chat.__struct_fields__, "adapters"), WITHIN)
    return ParsedCall(
        requests=(request,),
        renderer=renderer,
        truncate_prompt_tokens=chat.truncate_prompt_tokens,
    )


def _renderer(
    call: Call,
    chat: ChatBody,
    answer_id: str,
    model_name: str,
    num_choices: int,
    form: AnswerForm | None,
) -> Renderer:
    answer = chat.answer(
        id=answer_id,
        model=model_name,
        num_choices=num_choices,
        logprobs=bool(chat.logprobs),
        compact=False,
        as_events="text/event-stream" in call.headers.get("accept", ""),
        error=error_body,
    )
    before = echoed_text(chat)
    kind = ChatStreamRenderer if chat.stream else ChatRenderer
    return kind(answer, form, before=before)
