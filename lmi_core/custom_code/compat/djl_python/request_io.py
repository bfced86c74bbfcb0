"""What input formatters return and output formatters are called with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Token:
    """A generated token; ``log_prob`` is a natural logarithm."""

    id: int
    text: str
    log_prob: float | None = None
    special_token: bool | None = None
    error_msg: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The token as LMI's answers show it."""
        result: dict[str, Any] = {"id": self.id, "text": self.text, "log_prob": self.log_prob}
        if self.special_token:
            result["special_token"] = True
        if self.error_msg:
            result["error_msg"] = self.error_msg
        return result


@dataclass
class Sequence:
    """One answer so far. ``finish_reason`` is set with its last token."""

    tokens: list[Token] = field(default_factory=list)
    top_tokens: list[list[Token]] = field(default_factory=list)
    cumulative_log_prob: float = 0.0
    finish_reason: str | None = None
    _num_read: int = 0

    def has_next_token(self) -> bool:
        return self._num_read < len(self.tokens)

    def get_next_token(self) -> tuple[Token | None, bool, bool]:
        """The next token that wasn't read yet, whether it is the first, and the last."""
        if not self.has_next_token():
            return None, False, False
        index = self._num_read
        self._num_read += 1
        is_last = self.finish_reason is not None and self._num_read == len(self.tokens)
        return self.tokens[index], index == 0, is_last

    def get_last_token(self) -> Token | None:
        """The answer's last token once it has ended."""
        return self.tokens[-1] if self.finish_reason is not None and self.tokens else None


@dataclass
class RequestInput:
    """The request that an output belongs to."""

    request_id: int = 0
    output_formatter: Any = None
    parameters: dict[str, Any] = field(default_factory=dict)
    server_parameters: dict[str, Any] = field(default_factory=dict)


@dataclass
class TextInput(RequestInput):
    input_text: str | list[str] = ""
    input_ids: list[int] | None = None
    adapters: Any = None
    tokenizer: Any = None


@dataclass
class RequestOutput:
    """A request's output at one moment."""

    request_id: int
    input: RequestInput
    finished: bool = False


@dataclass
class TextGenerationOutput(RequestOutput):
    """Sequences by number; one token is new in each call."""

    sequences: dict[int, Sequence] = field(default_factory=dict)
    best_sequence_index: int = 0
    other_sequences_indices: list[int] = field(default_factory=list)
    prompt_tokens_details: list[Token] = field(default_factory=list)
