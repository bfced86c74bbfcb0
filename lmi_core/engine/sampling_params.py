"""How the next token is chosen, and when a request ends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lmi_core.engine.logits_processors import NO_PROCESSORS, LogitsProcessors
from lmi_core.engine.param_checks import check_float, check_ids, check_int, number, wrong_type
from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar
from lmi_core.structured.thinking_budget import ThinkingBudget

_MAX_LOGIT_BIAS = 1e9
"""Decides whatever the logits are, and leaves sums finite in float32."""

MAX_STOPS, MAX_STOP_CHARS = 1024, 16_384
"""Stop strings of a request, and their characters together: each takes 300 bytes to look for. The
same of bad words."""
_MAX_BAD_IDS = 65_536
"""Of all sequences of ``bad_words_ids`` together."""
_MANY_IDS = 8192
"""What takes a millisecond to check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling and stopping rules. ``temperature`` 0 is greedy.

    Penalties follow their usual definitions: repetition (CTRL, Keskar et al. 2019, over prompt and
    output), presence and frequency (OpenAI API, over output).
    """

    max_new_tokens: int | None = None
    """None: as many as fit into the context."""
    min_new_tokens: int = 0
    """End-of-sequence and stop ids are banned before this many tokens."""
    temperature: float = 0.0
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    """Locally typical sampling (Meister et al. 2022), after the other filters. 1: off."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """None: derived from the engine's seed and the request's number."""
    n: int = 1
    """Choices per request; choice i samples with the seed and its index."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    """Keep a matched stop string in the text."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    """Which errors call by the name that requests have for them, suppress_tokens."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Nothing else is generated, an end-of-sequence id included; None: anything may be."""
    logprobs: int | None = None
    """None: none are reported; 0: the token's own; n: also the n most likely; -1: the whole
    vocabulary's."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, reported once before the first token."""
    skip_special_tokens: bool = True
    kept_special_tokens: tuple[str, ...] = ()
    """Special tokens that are part of the text all the same, by their texts."""
    no_repeat_ngram_size: int = 0
    """So many tokens in a row come once at most, the prompt's included; 0: off."""
    bad_words: tuple[str, ...] = ()
    """Texts that aren't generated where they begin with a token, after a blank or without one."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """The same as token ids, each of which ends a sequence that isn't generated."""
    watermark_delta: float = 0.0
    """Added to the logits of tokens that the token before favours (Kirchenbauer et al. 2023); 0:
    off."""
    watermark_gamma: float = 0.5
    """The share of the vocabulary that is favoured."""
    num_beams: int = 1
    """Above 1: beam search, of which the best ``n`` texts are given when it has ended."""
    length_penalty: float = 1.0
    """A beam's score is divided by its length to this power."""
    early_stopping: bool | Literal["never"] = False
    """Whether a search ends when as many texts as beams have; else when no beam looks as if it
    could still be better, or ("never") none can be."""
    penalty_alpha: float | None = None
    """Contrastive search among the ``top_k`` likeliest tokens, whose likeness to the text before
    counts so much, and their probability the rest of 1; None: no such search."""
    processors: LogitsProcessors | None = None
    """Of Transformers' logits processors those that have no other name here; None: no such."""
    grammar: Grammar | None = None
    """What the text must follow. Unless something else ends it, it ends when it is complete."""
    thinking: ThinkingBudget | None = None
    """How much of the text may be reasoning; None: all of it."""

    def validate(self, *, vocab_size: int, max_logprobs: int) -> None:
        """Raise UserError naming the first field out of range, or of another type."""
        self.check_types()
        self.check_values(vocab_size=vocab_size, max_logprobs=max_logprobs)

    def check_values(self, *, vocab_size: int, max_logprobs: int) -> None:
        """The same, once ``check_types`` has been called."""
        check_int("max_new_tokens", self.max_new_tokens, 1, None)
        check_int("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_int("top_k", self.top_k, 0, None)
        check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        check_float("repetition_penalty", self.repetition_penalty, 0.001, 100.0)
        check_float("presence_penalty", self.presence_penalty, -100.0, 100.0)
        check_float("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        check_int("seed", self.seed, 0, 2**64 - 1)
        check_int("n", self.n, 1, 128)
        also = " (which top_logprobs and top_n_tokens ask for, too)"
        check_int("logprobs", _whole(self.logprobs, vocab_size), 0, max_logprobs, also)
        check_int("prompt_logprobs", _whole(self.prompt_logprobs, vocab_size), 0, max_logprobs)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            message = "grammar must be a Grammar, such as Grammar.json_schema({...})"
            raise wrong_type("grammar", self.grammar, message)
        if self.thinking is not None:
            self.thinking.validate()
        if self.stop:
            self._check_stop()
        if self.kept_special_tokens:
            check_texts("kept_special_tokens", self.kept_special_tokens)
        check_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        check_ids("suppress_tokens", self.banned_token_ids, vocab_size)
        if self.allowed_token_ids is not None:
            check_ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
            if not self.allowed_token_ids:
                message = "allowed_token_ids is empty; name at least one, or None for all"
                raise UserError(message, field="allowed_token_ids")
        if self.logit_bias:
            self._check_logit_bias(vocab_size)
        check_int("no_repeat_ngram_size", self.no_repeat_ngram_size, 0, None)
        if self.bad_words or self.bad_words_ids:
            self._check_bad_words(vocab_size)
        check_int("num_beams", self.num_beams, 1, 128)
        if self.penalty_alpha is not None:
            self._check_contrastive()
        elif self.num_beams > 1:
            self._check_beams()
        if self.processors is not None:
            self.processors.validate(vocab_size=vocab_size, is_search=self.is_search)
        processors = self.processors or NO_PROCESSORS
        processors.check_possible(self.banned_token_ids, vocab_size)
        check_float("watermark_delta", self.watermark_delta, -100.0, 100.0)
        check_float("watermark_gamma", self.watermark_gamma, 0.0, 1.0)

    @property
    def num_sequences(self) -> int:
        """That may run at once: choices, or a search's beams or candidates."""
        return max(self.n, self.num_beams, 1 if self.penalty_alpha is None else self.top_k)

    @property
    def has_many_ids(self) -> bool:
        """Whether they take so long to check that the event loop would be held."""
        lists = (self.stop_token_ids, self.logit_bias, self.banned_token_ids)
        num_ids = sum(map(len, (*lists, self.allowed_token_ids or (), *self.bad_words_ids)))
        return num_ids + (self.processors or NO_PROCESSORS).num_ids > _MANY_IDS

    @property
    def is_search(self) -> bool:
        """Whether its sequences go on from each other."""
        return self.num_beams > 1 or self.penalty_alpha is not None

    def too_many_bans(self, num_generated: int) -> UserError:
        """What is said where no token may come behind so many."""
        processors = self.processors or NO_PROCESSORS
        names = ["suppress_tokens"] if self.banned_token_ids else []
        names += [name for name in _BANS if getattr(self, name) != getattr(_USUAL, name)]
        names += [name for name in _BANS_OF_PROCESSORS if name in processors.names]
        names += [each.field for each in (self.grammar, self.thinking) if each is not None]
        leave = "leaves" if len(names) == 1 else "leave"
        return UserError(
            f"no token could be sampled: behind {num_generated} generated ones "
            f"{' and '.join(names)} {leave} none; ban less, or lower max_new_tokens",
            field=names[0] if names else None,
        )

    def check_types(self) -> None:
        """Raise UserError naming the first field, but for numbers, that can't be looked into."""
        for name in _SWITCHES:
            if type(value := getattr(self, name)) is not bool:
                raise wrong_type(name, value, f"{name} must be True or False")
        for name, what in _LISTS.items():
            value = getattr(self, name)
            if not isinstance(value, _SEQUENCE) and (value is not None or name not in _UNSET):
                name = "suppress_tokens" if name == "banned_token_ids" else name
                raise wrong_type(name, value, f"{name} must be a tuple of {what}")
        for name, kind in _OBJECTS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise wrong_type(name, value, f"{name} must be a {kind.__name__} or None")
        if not all(isinstance(ids, _SEQUENCE) for ids in self.bad_words_ids):
            message = "bad_words_ids must be a tuple of tuples of token ids"
            raise wrong_type("bad_words_ids", self.bad_words_ids, message)

    def _check_contrastive(self) -> None:
        assert self.penalty_alpha is not None
        check_float("penalty_alpha", self.penalty_alpha, 0.0, 1.0)
        check_int("top_k", self.top_k, 1, 128, " (the candidates of contrastive search)")
        what = f"penalty_alpha is {self.penalty_alpha:g}, and contrastive search"
        self._check_search(what, _NOT_WITH_CANDIDATES)

    def _check_beams(self) -> None:
        check_int("n", self.n, 1, self.num_beams, " (num_beams)")
        check_float("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.early_stopping not in (False, True, "never"):
            message = 'early_stopping must be true, false or "never"'
            raise wrong_type("early_stopping", self.early_stopping, message)
        self._check_search(f"num_beams is {self.num_beams}, and beam search", _NOT_WITH_BEAMS)

    def _check_search(self, what: str, lacking: tuple[str, ...]) -> None:
        """Raise UserError naming the first field that the search lacks, as the request calls it."""
        for name in (*lacking, *_NOT_IN_SEARCHES):
            value = getattr(self, name)
            if value == getattr(_USUAL, name) or (name == "logprobs" and value == 0):
                continue
            said = getattr(value, "field", name)
            raise UserError(
                f"{what} has no {said}{_NOTES.get(name, '')}: leave one of them out", field=said
            )

    def counted(self, vocab_size: int) -> SamplingParams:
        """The same with numbers in the place of -1."""
        if -1 not in (self.logprobs, self.prompt_logprobs):
            return self
        return replace(
            self,
            logprobs=_whole(self.logprobs, vocab_size),
            prompt_logprobs=_whole(self.prompt_logprobs, vocab_size),
        )

    def _check_stop(self) -> None:
        check_texts("stop", self.stop)
        if "" in self.stop:
            raise UserError(
                "stop and stop_sequences must not contain an empty string", field="stop"
            )

    def _check_bad_words(self, vocab_size: int) -> None:
        check_texts("bad_words", self.bad_words)
        if not all(text.strip() for text in self.bad_words):
            raise UserError("bad_words must not contain an empty text", field="bad_words")
        if len(self.bad_words_ids) > MAX_STOPS or not all(self.bad_words_ids):
            raise UserError(
                f"bad_words_ids must be at most {MAX_STOPS} sequences of a token id or more each",
                field="bad_words_ids",
            )
        if (num_ids := sum(map(len, self.bad_words_ids))) > _MAX_BAD_IDS:
            raise UserError(
                f"bad_words_ids has {num_ids} token ids; at most {_MAX_BAD_IDS} are allowed "
                "together",
                field="bad_words_ids",
            )
        for sequence in self.bad_words_ids:
            check_ids("bad_words_ids", sequence, vocab_size)

    def _check_logit_bias(self, vocab_size: int) -> None:
        try:
            check_ids("logit_bias", tuple(token_id for token_id, _ in self.logit_bias), vocab_size)
        except (TypeError, ValueError):
            message = "logit_bias must be pairs of a token id and a bias"
            raise wrong_type("logit_bias", self.logit_bias, message) from None
        for token_id, bias in self.logit_bias:
            if type(bias) not in (int, float):
                raise wrong_type(
                    "logit_bias", bias, f"logit_bias of token {token_id} must be a number"
                )
            if not abs(bias) <= _MAX_LOGIT_BIAS:
                raise UserError(
                    f"logit_bias of token {token_id} must be between {-_MAX_LOGIT_BIAS:g} and "
                    f"{_MAX_LOGIT_BIAS:g}, got {number(bias)}",
                    field="logit_bias",
                )


_USUAL = SamplingParams()
_SWITCHES = ("include_stop", "ignore_eos", "skip_special_tokens")
_LISTS = {
    "stop": "strings",
    "kept_special_tokens": "strings",
    "bad_words": "strings",
    "stop_token_ids": "token ids",
    "banned_token_ids": "token ids",
    "allowed_token_ids": "token ids",
    "bad_words_ids": "tuples of token ids",
    "logit_bias": "pairs of a token id and a bias",
}
_OBJECTS: dict[str, type] = {"processors": LogitsProcessors, "thinking": ThinkingBudget}
_SEQUENCE = (tuple, list)
_UNSET = ("allowed_token_ids",)
"""Of the lists, what may be None."""
_BANS = (
    "allowed_token_ids",
    "bad_words",
    "bad_words_ids",
    "no_repeat_ngram_size",
    "min_new_tokens",
)
_BANS_OF_PROCESSORS = ("begin_suppress_tokens", "encoder_no_repeat_ngram_size")
_NOT_IN_SEARCHES = (
    "temperature",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "watermark_delta",
    "logit_bias",
    "allowed_token_ids",
    "grammar",
    "thinking",
    "prompt_logprobs",
)
_NOTES = {
    "temperature": " (for which do_sample asks, too, and top_p and its like)",
    "watermark_delta": " (for which watermark asks)",
}
_NOT_WITH_BEAMS = ("stop", "logprobs")
_NOT_WITH_CANDIDATES = ("num_beams", "n")


def check_texts(name: str, texts: tuple[str, ...]) -> None:
    """UserError for too many or too long stop strings, or the like, of the field ``name``."""
    if len(texts) > MAX_STOPS:
        raise UserError(
            f"{name} has {len(texts)} strings; at most {MAX_STOPS} are allowed", field=name
        )
    if not all(isinstance(text, str) for text in texts):
        raise wrong_type(name, texts, f"{name} must be a tuple of strings")
    num_chars = sum(map(len, texts))
    if num_chars > MAX_STOP_CHARS:
        raise UserError(
            f"{name} has {num_chars} characters; at most {MAX_STOP_CHARS} are allowed together",
            field=name,
        )


def _whole(count: int | None, vocab_size: int) -> int | None:
    return vocab_size if count == -1 else count
