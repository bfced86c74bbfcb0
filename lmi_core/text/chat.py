"""Chat templates: messages to one prompt, rendered exactly as ``transformers`` renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext

from lmi_core.errors import ModelError, UserError
from lmi_core.files import read_json, read_text
from lmi_core.text.metered_template import CostlyTemplateError, MeteredEnvironment
from lmi_core.text.template_files import (
    configured_templates,
    given_template,
    special_tokens,
    template_files,
)
from lmi_core.text.template_language import compile_template, template_variables
from lmi_core.tools.forms import HERMES, ToolForm, form_shown
from lmi_core.tools.reasoning import REASONING, ReasoningForm, reasoning_shown

Message = Mapping[str, Any]

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
MAX_PROMPT_CHARS = 16 << 20
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_HERE "


class ChatTemplate:
    """A model's chat templates: the default one, and others by name (such as ``tool_use``)."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        *,
        tool_form: ToolForm | None = None,
        reasoning: ReasoningForm | Literal["none"] | None = None,
        auto_tools: bool = True,
        origins: Mapping[str, str] | None = None,
    ) -> None:
        """``special_tokens``: variables of the template, such as ``bos_token``. ``tool_form``,
        ``reasoning``: None if the template is to show it. ``auto_tools``: the model may be left
        to choose whether to call tools. ``origins``: where each template was found."""
        self._origins = dict(origins or {})
        self._tool_form = tool_form
        self._reasoning = reasoning
        self.auto_tools = auto_tools
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        template: str | None = None,
        config_path: Path | None = None,
        tool_form: ToolForm | None = None,
        reasoning: ReasoningForm | Literal["none"] | None = None,
        auto_tools: bool = True,
    ) -> ChatTemplate | None:
        """The templates of a model directory; None when it has none.

        ``chat_template.jinja`` (with ``additional_chat_templates/*.jinja``) wins over
        ``chat_template`` in ``tokenizer_config.json``. ``config_path`` stands in for all of these,
        ``template`` (a file, or Jinja text) for the default template. Raises ModelError for files
        that can't be read.
        """
        is_named = config_path is not None
        if config_path is not None and not config_path.is_file():
            raise ModelError(
                f"there is no file {config_path}", field="option.tokenizer_config_path"
            )
        config_path = config_path or directory / "tokenizer_config.json"
        config = read_json(config_path)
        templates = configured_templates(config.get("chat_template"), config_path)
        origins = dict.fromkeys(templates, str(config_path))
        for name, path in {} if is_named else template_files(directory).items():
            templates[name], origins[name] = read_text(path), str(path)
        if template is not None:
            templates["default"] = given_template(template, directory)
            origins["default"] = "option.chat_template"
        if not templates:
            return None
        older = read_json(directory / "special_tokens_map.json")
        return cls(
            templates,
            special_tokens({**older, **config}),
            tool_form=tool_form,
            reasoning=reasoning,
            auto_tools=auto_tools,
            origins=origins,
        )

    def faults(self) -> list[str]:
        """What is broken in the templates: chats that need them will be refused with it."""
        faults = []
        for name, source in self._templates.items():
            try:
                compile_template(source)
            except jinja2.TemplateSyntaxError as error:
                where = [
                    self._origins.get(name, ""),
                    "" if name == "default" else f"template {name}",
                ]
                note = ", ".join(part for part in where if part)
                faults.append(_broken(error) + (f" ({note})" if note else ""))
        if "default" not in self._templates:
            faults.append(self._no_default())
        return faults

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for ``messages``; it holds its special tokens as text.

        ``continue_final_message`` leaves the last message open, for the model to go on with it.
        Raises UserError when the template refuses the messages, ModelError when it is broken.
        """
        source = self._choose(has_tools=tools is not None)
        chat = [_with_reasoning(_of_known_role(message, source)) for message in messages]
        final = _mark_final(chat) if continue_final_message else None
        values = {**self._special_tokens, **variables}
        try:
            text = _rendered(
                compile_template(source),
                chat,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt and final is None,
                **values,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(_broken(error)) from None
        except (CostlyTemplateError, UserError):
            raise
        except jinja2.TemplateError as error:
            raise UserError(
                f"The chat template refuses the messages: {error}", field="messages"
            ) from None
        except Exception as error:  # a template is a program, which may fail in any way
            raise UserError(
                f"The chat template fails on these messages: {type(error).__name__}: {error}",
                field="messages",
            ) from None
        return text if final is None else _cut_at_mark(text, final)

    @property
    def takes_tools(self) -> bool:
        """Whether tools given to ``render`` reach the prompt."""
        if "tool_use" in self._templates:
            return True
        return "tools" in template_variables(self._choose(has_tools=False))

    @property
    def takes_tool_calls(self) -> bool:
        """Whether calls and results among the messages reach the prompt."""
        return "tool_calls" in self._choose(has_tools=True)

    @property
    def tool_form(self) -> ToolForm:
        """How the model was taught to write tool calls, as far as the template shows it."""
        return self._tool_form or form_shown(self._choose(has_tools=True))

    @property
    def told_form(self) -> ToolForm:
        """The form of calls where the template has no place for tools."""
        return self._tool_form or HERMES

    @property
    def reasoning(self) -> ReasoningForm | None:
        """Between which marks the model thinks, as far as the template shows it."""
        if self._reasoning is not None:
            return None if self._reasoning == "none" else self._reasoning
        name = reasoning_shown(self._choose(has_tools=False))
        return None if name is None else REASONING[name]

    def _choose(self, *, has_tools: bool) -> str:
        names = ("tool_use", "default") if has_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise ModelError(self._no_default())

    def _no_default(self) -> str:
        found = ", ".join(sorted(self._templates))
        return f"The model has no default chat template, only {found}"


def _broken(error: jinja2.TemplateSyntaxError) -> str:
    return f"The chat template is broken: line {error.lineno}: {error.message}"


def _rendered(template: jinja2.Template, messages: Sequence[Message], **values: Any) -> str:
    environment = template.environment
    assert isinstance(environment, MeteredEnvironment)
    environment.start(sum(len(message.get("content") or "") for message in messages))
    pieces, num_chars = [], 0
    for piece in template.generate(messages=messages, **values):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_PROMPT_CHARS:
            raise UserError(
                f"The chat template makes a prompt of more than {MAX_PROMPT_CHARS} characters of "
                "these messages; shorten them",
                field="messages",
            )
    return "".join(pieces)


def _of_known_role(message: Message, source: str) -> Message:
    """OpenAI's newer name of the system's role, for templates that were written before it."""
    if message.get("role") != "developer" or "developer" in source:
        return message
    return {**message, "role": "system"}


def _with_reasoning(message: Message) -> dict[str, Any]:
    """Templates read a message's reasoning under different names; fill them all in."""
    reasoning = next((message[n] for n in _REASONING_FIELDS if message.get(n) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_final(chat: list[dict[str, Any]]) -> str:
    """Append a mark to the last message's text; returns that text."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_MARK
        return content
    for index in range(len(content or ()) - 1, -1, -1):
        part = (content or ())[index]
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            marked = {**part, "text": part["text"] + _CONTINUE_MARK}
            chat[-1]["content"] = [*content[:index], marked, *content[index + 1 :]]  # type: ignore[index]
            return str(part["text"])
    raise UserError("There is no text in the last message to continue", field="messages")


def _cut_at_mark(text: str, final: str) -> str:
    position = text.rfind(_CONTINUE_MARK.strip())
    if position < 0 or final.strip() not in text:
        raise UserError(
            "The chat template drops the last message, so that it can't be continued",
            field="messages",
        )
    if text.startswith(_CONTINUE_MARK, position):
        return text[:position]
    # The template trims what it is given, so the text's own trailing blanks are gone too.
    return text[:position].rstrip()
