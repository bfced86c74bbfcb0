"""Chat templates: messages to one prompt, rendered exactly as ``transformers`` renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser

from lmi_core.errors import ModelError, UserError
from lmi_core.text.metered_template import CostlyTemplateError, MeteredEnvironment
from lmi_core.tools.forms import HERMES, ToolForm, form_shown
from lmi_core.tools.reasoning import REASONING, ReasoningForm, reasoning_shown

Message = Mapping[str, Any]

_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
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
        config = _read_json(config_path)
        templates = _configured(config.get("chat_template"), config_path)
        origins = dict.fromkeys(templates, str(config_path))
        for name, path in {} if is_named else _template_files(directory).items():
            templates[name], origins[name] = _read_text(path), str(path)
        if template is not None:
            templates["default"] = _given(template, directory)
            origins["default"] = "option.chat_template"
        if not templates:
            return None
        older = _read_json(directory / "special_tokens_map.json")
        return cls(
            templates,
            _special_tokens({**older, **config}),
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


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it only groups."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """Compile in the environment that the ecosystem's templates are written for."""
    return _environment().from_string(source)


@lru_cache(maxsize=64)
def template_variables(source: str) -> frozenset[str]:
    """The variables that a template reads; none for a broken one."""
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(source)))
    except jinja2.TemplateSyntaxError:
        return frozenset()


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


def _environment() -> MeteredEnvironment:
    environment = MeteredEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.set_filter("tojson", _to_json)
    environment.set_function("raise_exception", _raise_exception)
    environment.set_function("strftime_now", _strftime_now)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter: no HTML escapes, and layout is up to the template."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


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


def _template_files(directory: Path) -> dict[str, Path]:
    named = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    files = {path.stem: path for path in named}
    main = directory / "chat_template.jinja"
    if main.is_file():
        files["default"] = main
    return files


def _given(template: str, directory: Path) -> str:
    """Jinja text, or that of a file beside the model or elsewhere."""
    if "{" in template:
        return template
    for path in (directory / template, Path(template)):
        if path.is_file():
            return _read_text(path)
    raise ModelError(
        f"option.chat_template={template[:200]} is neither a file nor Jinja text",
        field="option.chat_template",
    )


def _configured(value: object, path: Path) -> dict[str, str]:
    """``chat_template`` is one template, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        templates = {entry["name"]: entry["template"] for entry in value}  # type: ignore[attr-defined]
    except (TypeError, KeyError):
        templates = {"": None}
    if not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise ModelError(
            f"{path}: chat_template must be a text or a list of objects with the texts name and "
            f"template, got {str(value)[:80]}",
            field="chat_template",
        )
    return templates


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in _TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold an object, not {type(value).__name__}")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"Can't read {path}: {error}") from None
