"""Prompts of models that were taught to fill in a gap: what comes before it and what after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class InfillForm:
    """``template`` has ``{prefix}`` and ``{suffix}``; ``tokens`` are those that it is known by."""

    template: str
    tokens: tuple[str, ...]

    def prompt(self, prefix: str, suffix: str) -> str:
        before, after = self.template.split("{prefix}")
        if "{suffix}" in before:  # the suffix comes first
            return before.replace("{suffix}", suffix) + prefix + after
        return before + prefix + after.replace("{suffix}", suffix)


def _marked(before: str, between: str, after: str) -> InfillForm:
    """The prefix between the first two marks, the suffix between the last two."""
    return InfillForm(f"{before}{{prefix}}{between}{{suffix}}{after}", (before, between, after))


FORMS = (
    _marked("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    _marked("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    _marked("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    _marked(*(f"<\uff5cfim▁{part}\uff5c>" for part in ("begin", "hole", "end"))),
    _marked("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    InfillForm("▁<PRE> {prefix} ▁<SUF>{suffix} ▁<MID>", ("▁<PRE>", "▁<SUF>", "▁<MID>")),
    InfillForm("[SUFFIX]{suffix}[PREFIX]{prefix}", ("[SUFFIX]", "[PREFIX]")),
)
"""Qwen Coder and CodeGemma, StarCoder and Granite, SantaCoder, DeepSeek Coder, GLM, Code Llama,
Codestral: as their model cards write it."""


def infill_form(token_id: Callable[[str], int | None]) -> InfillForm | None:
    """The form whose marks a vocabulary has; None for a model without one."""
    for form in FORMS:
        if all(token_id(token) is not None for token in form.tokens):
            return form
    return None
