"""How conversations and plain texts are written down as one string for the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

BEGIN = "<|begin|>"
END_OF_TEXT = "<|endoftext|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
END_OF_TURN = "<|end|>"

SPECIAL_TOKENS = (BEGIN, END_OF_TEXT, SYSTEM, USER, ASSISTANT, END_OF_TURN)
"""In the order of their ids, from 0."""

TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The chat template (Jinja); `render_chat` is its twin for the generator."""


class Turn(NamedTuple):
    """One message of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    text: str


def render_chat(turns: Iterable[Turn], *, generation_prompt: bool = False) -> str:
    """The conversation as the chat template writes it, special tokens spelled out."""
    body = "".join(f"<|{turn.role}|>{turn.text.strip()}{END_OF_TURN}" for turn in turns)
    return BEGIN + body + (ASSISTANT if generation_prompt else "")


def render_text(text: str) -> str:
    """A plain document, from its begin token to its end token."""
    return f"{BEGIN}{text.strip()}{END_OF_TEXT}"
