"""``tools`` and ``tool_choice`` of a chat: what the model is told, and how its calls are found.

With ``auto`` the model is free, and calls are looked for in its text; only the arguments of
``strict`` tools are held to their schema. ``required`` and a named tool are enforced by a grammar,
arguments included, once the model has ended its reasoning. Where an answer has a grammar of its
own, a text is calls or that, by one grammar. A subset of the tools may be allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar, Thought
from lmi_core.text.chat import ChatTemplate
from lmi_core.tools.calls_or_answer import optional_calls, parse_optional
from lmi_core.tools.forms import FORMS, ToolForm
from lmi_core.tools.reader import Parse, TextParser
from lmi_core.tools.reasoning import HARMONY, REASONING, ReasoningForm
from lmi_core.tools.tools import (
    Tool,
    call_grammar,
    calls_as_text,
    free_grammar,
    tool_of,
    with_instructions,
)

_MAX_TOOLS = 128
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_CHOICES = ("auto", "none", "required")
HARMONY_FORM = REASONING[HARMONY]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTools:
    """The tools that a chat's model may call."""

    tools: tuple[Tool, ...]
    form: ToolForm
    forced: tuple[Tool, ...] = ()
    """Those of which calls must be made; none: the model is free."""
    is_parallel: bool = True

    @property
    def is_strict(self) -> bool:
        """Whether the model is free, but for the arguments of strict tools."""
        return not self.forced and any(tool.strict for tool in self.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How the text of a chat's answer is taken apart: reasoning, content, calls."""

    tools: ChatTools | None = None
    reasoning: ReasoningForm | None = None
    is_open: bool = False
    """The text begins within reasoning."""
    shows_reasoning: bool = True
    has_grammar: bool = False
    """An answer that isn't calls follows a grammar of the request's own."""

    @property
    def has_reasoning(self) -> bool:
        """Whether answers have fields for reasoning."""
        return self.reasoning is not None and self.shows_reasoning

    def grammar(self, asked: Grammar | None) -> Grammar | None:
        """Of the calls that must be made, of the text where a strict tool may be called, or what a
        request has ``asked`` for itself; reasoning may come before calls and that."""
        tools = self.tools
        if tools is not None and tools.forced:
            grammar = call_grammar(tools.forced, tools.form, is_parallel=tools.is_parallel)
            return replace(grammar, thought=self._thought())
        if asked is not None:
            lead = "" if self.reasoning is None else self.reasoning.lead
            calls = None
            if tools is not None:
                calls = optional_calls(tools.tools, tools.form, is_parallel=tools.is_parallel)
            return replace(asked, thought=self._thought(lead), instead=calls)
        if tools is None:
            return None
        if tools.is_strict:
            return free_grammar(tools.tools, tools.form, is_parallel=tools.is_parallel)
        return None

    def _thought(self, lead: str = "") -> Thought | None:
        reasoning = self.reasoning
        if reasoning is None:
            return None
        return Thought(
            begin=reasoning.begin,
            end=reasoning.end,
            after=reasoning.after,
            lead=lead,
            is_open=self.is_open,
        )

    @property
    def marks(self) -> tuple[str, ...]:
        """Special tokens that the parser has to see."""
        marks = () if self.reasoning is None else (*self.reasoning.marks, self.reasoning.after)
        if self.reasoning == HARMONY_FORM:
            marks = FORMS["openai"].marks
        return tuple(filter(None, (*marks, *(self.tools.form.marks if self.tools else ()))))

    def parser(self) -> TextParser:
        """For one choice's text."""
        tools = () if self.tools is None else self.tools.tools
        parses: list[Parse] = []
        is_harmony = self.reasoning == HARMONY_FORM
        if self.reasoning is not None and not is_harmony:
            parses.append(self.reasoning.parser(is_open=self.is_open))
        if self.tools is not None:
            parses.append(self._parse_calls(self.tools))
        elif is_harmony:
            parses.append(FORMS["openai"].parse(False))
        schemas = {tool.name: tool.parameters for tool in tools}
        return TextParser(parses, schemas, self.parser)

    def _parse_calls(self, tools: ChatTools) -> Parse:
        if self.has_grammar and not tools.forced:
            return parse_optional(tools.tools, tools.form)
        # Of a strict tool no call may come in a form that the grammar doesn't know.
        return tools.form.parse(bool(tools.forced) or tools.is_strict)


def answer_form(
    tools: ChatTools | None,
    template: ChatTemplate | None,
    prompt: str,
    *,
    has_grammar: bool,
    shows_reasoning: bool = True,
) -> AnswerForm | None:
    """How the answer to a prompt is taken apart; None: it is content as it is.

    ``has_grammar``: the request has one of its own, which the text follows from its beginning on
    where the prompt has ended the reasoning.
    """
    reasoning = None if template is None else template.reasoning
    if reasoning is not None and has_grammar and reasoning.is_over_after(prompt):
        reasoning = None
    if tools is None and reasoning is None:
        return None
    return AnswerForm(
        tools=tools,
        has_grammar=has_grammar,
        reasoning=reasoning,
        is_open=reasoning is not None and reasoning.is_open_after(prompt),
        shows_reasoning=shows_reasoning,
    )


def chat_tools(
    definitions: list[Any] | None,
    choice: Any,
    *,
    form: ToolForm,
    is_parallel: bool,
) -> ChatTools | None:
    """The tools in play; None when none may be called. UserError names the field at fault."""
    tools = _tools(definitions or [])
    tools, choice = _allowed(tools, choice)
    chosen = _chosen(tools, choice)
    if not tools or choice == "none":
        return None
    is_free = choice in (None, "auto")
    return ChatTools(
        tools=tools, form=form, forced=() if is_free else chosen, is_parallel=is_parallel
    )


def _allowed(tools: tuple[Tool, ...], choice: Any) -> tuple[tuple[Tool, ...], Any]:
    """Without those that a choice of allowed tools leaves out, and its mode."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return tools, choice
    form = choice.get("allowed_tools", choice)
    given = form.get("tools") if isinstance(form, Mapping) else None
    mode = form.get("mode", "auto") if isinstance(form, Mapping) else None
    are_tools = isinstance(given, list) and all(isinstance(each, Mapping) for each in given)
    if not given or not are_tools or mode not in ("auto", "required"):
        raise UserError(
            'tool_choice.allowed_tools must be {"mode": "auto" or "required", "tools": [...]}',
            field="tool_choice",
        )
    chosen = [_chosen(tools, each)[0] for each in given]
    return tuple(tool for tool in tools if tool in chosen), mode


def render_with_tools(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: ChatTools | None,
    arguments: Mapping[str, Any],
) -> str:
    """The prompt; a template without a place for tools gets them as text."""
    offered = tools.tools if tools is not None else ()
    told: Sequence[Mapping[str, Any]] = messages
    if not template.takes_tool_calls:
        told = calls_as_text(told)
    if offered and not template.takes_tools:
        told, offered = with_instructions(told, offered), ()
    definitions = [tool.definition for tool in offered] or None
    return template.render(told, tools=definitions, **arguments)


def _tools(definitions: list[Any]) -> tuple[Tool, ...]:
    if len(definitions) > _MAX_TOOLS:
        raise UserError(
            f"tools has {len(definitions)} entries; at most {_MAX_TOOLS} are allowed", field="tools"
        )
    names: set[str] = set()
    for index, definition in enumerate(definitions):
        _check_tool(f"tools[{index}]", definition)
        name = definition["function"]["name"]
        if name in names:
            raise UserError(f"tools has {name!r} twice; names must differ", field="tools")
        names.add(name)
    return tuple(tool_of(definition) for definition in definitions)


def _check_tool(where: str, definition: Any) -> None:
    function = definition.get("function") if isinstance(definition, Mapping) else None
    if not (
        isinstance(function, Mapping)
        and isinstance(function.get("name"), str)
        and definition.get("type", "function") == "function"
    ):
        raise UserError(
            f'{where} must be {{"type": "function", "function": {{"name": ...}}}}', field=where
        )
    if not _NAME.fullmatch(function["name"]):
        raise UserError(
            f"{where}.function.name must be 1 to 64 letters, digits, dots, dashes or underscores, "
            f"got {function['name'][:80]!r}",
            field=where,
        )
    if not isinstance(function.get("strict"), bool | None):
        raise UserError(f"{where}.function.strict must be true or false", field=where)
    if not isinstance(function.get("parameters"), Mapping | None):
        raise UserError(f"{where}.function.parameters must be a JSON schema object", field=where)


def _chosen(tools: tuple[Tool, ...], choice: Any) -> tuple[Tool, ...]:
    """The tools that ``choice`` leaves."""
    if choice is None or choice in _CHOICES:
        if choice == "required" and not tools:
            raise UserError("tool_choice is required, but there are no tools", field="tool_choice")
        return tools
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise UserError(
            f'tool_choice must be {", ".join(_CHOICES)} or {{"type": "function", "function": '
            '{"name": ...}}',
            field="tool_choice",
        )
    chosen = tuple(tool for tool in tools if tool.name == name)
    if not chosen:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise UserError(
            f"tool_choice names {name[:80]!r}, which is not among the tools ({known})",
            field="tool_choice",
        )
    return chosen
