"""A request and its answer, with all that decides its tokens: one line of JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from lmi_core.engine.outputs import FinishReason, TokenEvent
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import UserError

_NUMBERS = frozenset(
    (
        *("max_new_tokens", "min_new_tokens", "ignore_eos", "seed", "n"),
        *("temperature", "top_k", "top_p", "min_p", "typical_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
        *("logprobs", "prompt_logprobs", "include_stop", "skip_special_tokens"),
        *("watermark_delta", "watermark_gamma", "penalty_alpha"),
        *("num_beams", "length_penalty", "early_stopping"),
    )
)
"""Parameters that can't hold what a client wrote."""


class Choice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One answer: each token's id and log-probability, None for one that isn't finite."""

    num_tokens: int = 0
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[float | None] = msgspec.field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None

    @property
    def is_cut_off(self) -> bool:
        """The caller had left, or the engine failed, before its end."""
        return self.finish_reason == FinishReason.ABORT


class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``params`` are those that aren't the defaults, with the seed that was used."""

    request_id: str
    time_s: float
    """When it had ended, since the epoch."""
    model: str
    fingerprint: str | None = None
    """Of weights, build, instruction set and formats; None: it wasn't known."""
    num_prompt_tokens: int
    prompt_token_ids: list[int] = msgspec.field(default_factory=list)
    params: dict[str, Any] = msgspec.field(default_factory=dict)
    adapter: str = ""
    adapter_digest: str = ""
    choices: list[Choice]
    is_redacted: bool = False
    """Nothing of it says what was asked or answered, only how much."""

    @property
    def num_tokens(self) -> int:
        """Of the longest answer."""
        return max((choice.num_tokens for choice in self.choices), default=0)

    def redacted(self) -> Receipt:
        return msgspec.structs.replace(
            self,
            is_redacted=True,
            prompt_token_ids=[],
            params={name: value for name, value in self.params.items() if name in _NUMBERS},
            choices=[
                Choice(num_tokens=choice.num_tokens, finish_reason=choice.finish_reason)
                for choice in self.choices
            ],
        )

    def sampling_params(self) -> SamplingParams:
        """Raises msgspec.ValidationError for parameters that this version doesn't have."""
        unknown = self.params.keys() - {field.name for field in fields(SamplingParams)}
        if unknown:
            raise msgspec.ValidationError(f"unknown parameters: {', '.join(sorted(unknown))}")
        return msgspec.convert(self.params, SamplingParams)


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Receipt)


def encode(receipt: Receipt) -> bytes:
    """A line, its end included."""
    return _ENCODER.encode(receipt) + b"\n"


def changed_params(params: SamplingParams, seed: int | None) -> dict[str, Any]:
    """What isn't as it is by default, for JSON."""
    given = dataclasses.replace(params, seed=seed)
    changed = {
        field.name: value
        for field in fields(given)
        if (value := getattr(given, field.name)) != field.default
    }
    plain: dict[str, Any] = msgspec.to_builtins(changed)
    return plain


def finite(logprob: float | None) -> float | None:
    return logprob if logprob is not None and math.isfinite(logprob) else None


class Answers:
    """The choices of a request, as its events come."""

    def __init__(self) -> None:
        self.seed: int | None = None
        self.num_prompt_tokens = 0
        self._choices: dict[int, Choice] = {}
        self._texts: dict[int, list[str]] = {}

    def add(self, event: TokenEvent) -> None:
        if event.prompt is not None or event.token_id < 0:
            return
        choice = self._choices.setdefault(event.choice, Choice())
        choice.token_ids.append(event.token_id)
        choice.logprobs.append(event.logprob)
        self._texts.setdefault(event.choice, []).append(event.text)
        if event.num_generated_tokens == 1:
            self.seed, self.num_prompt_tokens = event.seed, event.num_prompt_tokens
        if event.finish_reason is not None:
            choice.finish_reason = str(event.finish_reason)

    def so_far(self, num_choices: int) -> list[Choice]:
        """All choices in order; those without an end were cut off."""
        choices = [self._choices.get(index, Choice()) for index in range(num_choices)]
        for index, choice in enumerate(choices):
            choice.num_tokens = len(choice.token_ids)
            choice.logprobs = [finite(logprob) for logprob in choice.logprobs]
            choice.text = "".join(self._texts.get(index, ()))
            choice.finish_reason = choice.finish_reason or FinishReason.ABORT
        return choices


def read_receipts(path: Path) -> Iterator[tuple[str, Receipt | None]]:
    """The receipts of a file, or of all files of a directory, each with where it is; None: the line
    is cut off, as a crash can leave the last one. Raises UserError for what isn't a receipt."""
    files = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path} has no *.jsonl files of receipts", field="file")
    for file in files:
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    yield f"{file}:{number}", _decoded(f"{file}:{number}", line)
        except OSError as error:
            raise UserError(f"{file} can't be read: {error.strerror}", field="file") from None


def _decoded(where: str, line: bytes) -> Receipt | None:
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if not line.endswith(b"\n"):
            return None
        raise UserError(f"{where} is no receipt: {error}", field="file") from None
