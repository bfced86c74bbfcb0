"""Reasoning in a model's text, apart from its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lmi_core.tools.reader import Parse, Reader, Steps


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """Between which marks a model thinks."""

    begin: str
    end: str
    is_assumed: bool = False
    """A text without ``begin`` is reasoning, too, until ``end``: the template has begun it."""
    after: str = ""
    """What stands between reasoning and answer."""
    lead: str = ""
    """What stands in front of an answer that is no call."""

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin, self.end

    def is_open_after(self, prompt: str) -> bool:
        """Whether a text that follows a prompt begins within reasoning."""
        if self.is_over_after(prompt):
            return False
        return self.is_assumed or prompt.rstrip().endswith(self.begin)

    def is_over_after(self, prompt: str) -> bool:
        """Whether a prompt has ended the reasoning of the text that follows it."""
        return prompt.rstrip().endswith(self.end)

    def parser(self, *, is_open: bool) -> Parse:
        def parse(reader: Reader) -> Steps[None]:
            before = yield from reader.blanks()
            begun = yield from reader.starts_with(self.begin)
            if not begun and not is_open:
                reader.held = before + reader.held
                return
            yield from reader.blanks()
            yield from reader.show_until(_Trimmed(reader).show, self.end)
            yield from reader.blanks()

        return parse


class _Trimmed:
    """Shows reasoning without the blanks at its end."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._blanks = ""

    def show(self, text: str) -> None:
        text = self._blanks + text
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        self._reader.reasoning(shown)


_THINK = ReasoningForm("<think>", "</think>")

REASONING: Mapping[str, ReasoningForm] = {
    "deepseek_r1": ReasoningForm("<think>", "</think>", is_assumed=True),
    "minimax_m2": ReasoningForm("<think>", "</think>", is_assumed=True),
    "deepseek_v3": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "holo2": _THINK,
    "internlm": _THINK,
    "mistral": ReasoningForm("[THINK]", "[/THINK]"),
    "cohere": ReasoningForm("<|START_THINKING|>", "<|END_THINKING|>"),
    "granite": ReasoningForm("Here is my thought process:", "Here is my response:"),
    "seed_oss": ReasoningForm("<seed:think>", "</seed:think>"),
    "openai_gptoss": ReasoningForm(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        after="<|start|>assistant",
        lead="<|channel|>final<|message|>",
    ),
}
"""By the names that vLLM has for them. ``openai_gptoss`` is read by the tool form ``openai``,
which knows all channels."""

HARMONY = "openai_gptoss"

_SHOWN_BY = (
    ("<|channel|>analysis", HARMONY),
    ("[/THINK]", "mistral"),
    ("<|END_THINKING|>", "cohere"),
    ("</seed:think>", "seed_oss"),
    ("</think>", "qwen3"),
)


def reasoning_shown(template: str) -> str | None:
    """The form that a chat template's text shows; None if it shows none."""
    return next((name for mark, name in _SHOWN_BY if mark in template), None)
