"""TGI's chat answers that are tool calls (its router/src/infer/tool_grammar.rs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmi_core.engine.outputs import TokenEvent
from lmi_server.dialects.tgi.compact_json import quote
from lmi_server.dialects.tgi.events import Answer
from lmi_server.dialects.tgi.tools import ArgumentStream, arguments_of, called_name
from lmi_server.dialects.tgi.v1_events import ChatRenderer, ChatSseRenderer, Identity


class ToolCalls:
    """What becomes of one chat with tools."""

    def __init__(self) -> None:
        self.is_text = False
        """The model preferred to answer in text."""

    def answer_in_text(self) -> None:
        self.is_text = True


class ToolRenderer(ChatRenderer):
    """One object whose message has a call."""

    def __init__(self, identity: Identity, answers: Sequence[Answer], calls: ToolCalls) -> None:
        super().__init__(identity, answers)
        self._calls = calls

    def feed(self, index: int, events: Sequence[TokenEvent]) -> bytes:
        if self._calls.is_text and events:
            self._answers = [
                replace(self._answers[0], num_prompt_tokens=events[0].num_prompt_tokens)
            ]
        return super().feed(index, events)

    def _message(self, text: str) -> str:
        if self._calls.is_text:
            return super()._message(text)
        arguments = arguments_of(text)
        return f'{{"role":"assistant","tool_calls":[{_call(called_name(text), arguments, True)}]}}'


class ToolSseRenderer(ChatSseRenderer):
    """Chunks with pieces of a call."""

    def __init__(
        self,
        identity: Identity,
        answers: Sequence[Answer],
        *,
        includes_usage: bool,
        calls: ToolCalls,
    ) -> None:
        super().__init__(identity, answers, includes_usage=includes_usage)
        self._calls = calls
        self._arguments = ArgumentStream()

    def _frame(self, event: TokenEvent) -> str:
        if self._calls.is_text:
            return super()._frame(event)
        name, arguments = self._arguments.push(event.text)
        if event.finish_reason is not None:
            arguments += self._arguments.flush()
        if name is None and not arguments and event.finish_reason is None:
            self._note(0, event)
            return ""
        return self._chunk(event, f'"tool_calls":[{_call(name, arguments, False)}]')


def _call(name: str | None, arguments: str, is_whole: bool) -> str:
    """A call, or a piece of one, which has a name only if it is the first."""
    place = "" if is_whole else '"index":0,'
    described = '"description":null,' if is_whole else ""
    quoted = "null" if name is None else quote(name)
    return (
        f'{{{place}"id":"0","type":"function","function":{{{described}"name":{quoted},'
        f'"arguments":{quote(arguments)}}}}}'
    )
