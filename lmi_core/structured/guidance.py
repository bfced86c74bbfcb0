"""Grammars compiled by llguidance (https://github.com/guidance-ai/llguidance).

The library counts its work: a grammar that needs more than its limits fails, whatever the machine
and its load. On top, a matcher has a budget of processor time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np

from lmi_core.errors import UserError
from lmi_core.structured.grammar import Grammar, GrammarKind, Thought
from lmi_core.structured.marks import Marks, quote_mark, text_before_mark
from lmi_core.structured.matcher import Mask
from lmi_core.structured.size import check_size
from lmi_core.text.tokenizer import Tokenizer

_JSON_WHITESPACE = "[ ]?"
"""Between the parts of JSON; a model can't go on with blanks for ever."""
_PLAIN, _ANY = r'[^"\\\x00-\x1F\x7F]', "(?s:.)"
_SLICES = [f"{_PLAIN}{{1,10}}", f"{_PLAIN}{{1,40}}", f"{_ANY}{{1,40}}"]
"""Parts of the vocabulary, by what their tokens match: one that may come as a whole isn't walked
through. JSON's strings hold the first two, and texts of any characters all of them. Each takes
0.04 s of a start with 128,000 tokens."""
_FIRST_BUDGET_S, _TOKEN_BUDGET_S = 0.5, 0.005
"""Processor time of a matcher: at once, and more with every token. Others wait for it in every
step; of 128,000 tokens, JSON takes 0.02 ms for most masks, and less than 1 ms for nearly all."""
_MAX_FIRST_S = 1.0
_MAX_DRAFTED_CHARS = 8192
"""Of a grammar whose forced tokens are looked for, in the loop: the library finds all of them at
once, which takes 0.1 s for a constant of 30,000 characters."""
_MOST_LOOKS_S, _TOKEN_LOOKS_S = 0.002, 0.0002
"""Processor time in the loop for looks at what may come: at once, and more with every token. Where
it is spent nothing is drafted until there is some again; most looks take 5 µs."""
_MAX_REASON_CHARS = 300


class GuidanceLibrary:
    """Implements ``GrammarLibrary``."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        """``limits``: keyword arguments of ``LLParserLimits`` that differ from its defaults."""
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos_token_ids[0])),
            eos_token=list(eos_token_ids),
            slices=_SLICES,
        )
        self._marks = Marks(tokenizer.special_tokens)
        self._limits = llguidance.LLParserLimits(verbose_errors=False, **limits or {})

    def compile(self, grammar: Grammar) -> GuidanceGrammar:
        return _compile(grammar, self._tokenizer, self._limits, self._marks)


def _compile(
    grammar: Grammar,
    tokenizer: llguidance.LLTokenizer,
    limits: llguidance.LLParserLimits,
    marks: Marks,
) -> GuidanceGrammar:
    check_size(grammar)
    try:
        source = _source(grammar, marks)
    except (ValueError, RecursionError) as error:
        raise _refused(grammar, str(error)) from None
    compiled = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    if compiled.is_error():
        if grammar.instead is not None:
            _compile(grammar.instead, tokenizer, limits, marks)  # it raises if the fault is there
        raise _refused(grammar, compiled.get_error())
    made = GuidanceGrammar(compiled, may_draft=grammar.num_chars <= _MAX_DRAFTED_CHARS)
    # The first mask is mostly the one that takes longest, and every text's.
    first = made.matcher()
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
    try:
        first.fill_mask(mask)
    except UserError as error:
        raise _refused(grammar, str(error)) from None
    if first.spent_s > _MAX_FIRST_S:
        raise _refused(grammar, f"its first mask takes {first.spent_s:.1f} s; make it simpler")
    made.first_mask = mask
    return made


def try_grammar(grammar: Grammar) -> None:
    """Compile a grammar for a vocabulary of bytes, which takes as long as for any other. Raises
    what ``compile`` raises."""
    limits = llguidance.LLParserLimits(verbose_errors=False)
    _compile(grammar, llguidance.LLTokenizer("byte"), limits, Marks({}))


class GuidanceGrammar:
    """Implements ``CompiledGrammar``."""

    def __init__(self, compiled: llguidance.LLMatcher, *, may_draft: bool) -> None:
        self._compiled = compiled
        self._may_draft = may_draft
        self.first_mask: Mask | None = None

    def matcher(self) -> GuidanceMatcher:
        copy = self._compiled.deep_copy()
        return GuidanceMatcher(copy, may_draft=self._may_draft, first_mask=self.first_mask)


class GuidanceMatcher:
    """Implements ``Matcher``."""

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        *,
        may_draft: bool = True,
        first_mask: Mask | None = None,
    ) -> None:
        """``first_mask``: that of the text's beginning, if it is known."""
        self._matcher = matcher
        self._first_mask = first_mask
        self._may_draft = may_draft
        self._num_accepted = 0
        self._forced: list[int] = []
        self._forced_from = -1
        """Where the text was when they were found: what is forced is one list until it ends."""
        self._budget_s = _FIRST_BUDGET_S
        self._looks_s = _MOST_LOOKS_S
        self.spent_s = 0.0
        """Processor time of masks so far."""
        self._num_behind_end = 0
        """End ids accepted where the text was complete, which the library doesn't count."""

    def fill_mask(self, mask: Mask) -> None:
        if self._budget_s < 0:
            raise _too_slow("it takes too much processor time")
        started_s = time.thread_time()
        if self._first_mask is not None and not self._num_accepted:
            mask[: len(self._first_mask)] = self._first_mask
        else:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        spent_s = time.thread_time() - started_s
        self.spent_s += spent_s
        self._budget_s += _TOKEN_BUDGET_S - spent_s
        if self._matcher.is_error():
            raise _too_slow(_reason(self._matcher.get_error()))

    def accept(self, token_id: int) -> None:
        is_behind_end = self._matcher.is_stopped()
        if not self._matcher.consume_token(token_id):
            raise _too_slow(_reason(self._matcher.get_error()))
        self._num_behind_end += is_behind_end
        place = self._num_accepted - self._forced_from
        if 0 <= place < len(self._forced) and self._forced[place] != token_id:
            del self._forced[place:]
        self._num_accepted += 1
        self._looks_s = min(_MOST_LOOKS_S, self._looks_s + _TOKEN_LOOKS_S)

    def forced_tokens(self, behind: Sequence[int] = ()) -> list[int]:
        place = self._num_accepted - self._forced_from
        if not behind and 0 <= place < len(self._forced):
            return self._forced[place:]
        if not self._may_draft or self._looks_s <= 0 or self._matcher.is_stopped():
            return []
        started_s = time.thread_time()
        num_behind = self._matcher.try_consume_tokens(list(behind)) if behind else 0
        forced: list[int] = []
        if num_behind == len(behind):
            forced = list(self._matcher.compute_ff_tokens())
        if num_behind:
            self._matcher.rollback(num_behind)
        if not behind:
            self._forced, self._forced_from = forced, self._num_accepted
        self._looks_s -= time.thread_time() - started_s
        return list(forced)

    def num_allowed(self, token_ids: list[int]) -> int:
        if self._looks_s <= 0:
            return 0
        started_s = time.thread_time()
        num_allowed = int(self._matcher.validate_tokens(token_ids))
        self._looks_s -= time.thread_time() - started_s
        return num_allowed

    def rollback(self, num_tokens: int) -> None:
        self._num_accepted -= num_tokens
        num_behind_end = min(num_tokens, self._num_behind_end)
        self._num_behind_end -= num_behind_end
        if not self._matcher.rollback(num_tokens - num_behind_end):
            raise _too_slow(_reason(self._matcher.get_error()))

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def is_spent(self) -> bool:
        return False


class _Vocabulary:
    """What ``llguidance.TokenizerWrapper`` wants of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        assert tokenizer.token_bytes is not None
        self.tokens = [tokenizer.token_bytes[i] for i in range(vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text is needed, not bytes")
        return self._tokenizer.encode_now(text, add_special_tokens=False)


def _source(grammar: Grammar, marks: Marks) -> str:
    """The grammar in the library's own form; ValueError when it can't be read."""
    if grammar.thought is None and grammar.instead is None:
        return _text_source(grammar, marks)
    parts = _named_source("answer", grammar, marks)
    other = ""
    if grammar.instead is not None:
        parts += _named_source("instead", grammar.instead, marks)
        other = "@instead | "
    rules = _rules(grammar.thought, other)
    return json.dumps({"grammars": [{"lark_grammar": marks.resolve(rules)}, *parts]})


def _named_source(name: str, grammar: Grammar, marks: Marks) -> list[dict[str, Any]]:
    """As a part of a larger one."""
    source = _text_source(grammar, marks)
    is_composed = source.lstrip().startswith("{")
    first, *others = json.loads(source)["grammars"] if is_composed else [{"lark_grammar": source}]
    return [{**first, "name": name}, *others]


def _rules(thought: Thought | None, other: str) -> str:
    """Of reasoning, then the text or the ``other``."""
    if thought is None:
        return f"start: {other}@answer"
    begin = "" if thought.is_open else quote_mark(thought.begin)
    after = quote_mark(thought.after) if thought.after else ""
    lead = quote_mark(thought.lead) if thought.lead else ""
    return "\n".join(
        [
            f"start: thought{'' if thought.is_open else '?'} ({other}{lead} @answer)",
            f"thought: {begin} thinking {after} BLANKS?",
            f"thinking: {text_before_mark(thought.end)}",
            r"BLANKS: /\s{1,4}/",  # a model could go on with blanks for ever
        ]
    )


def _text_source(grammar: Grammar, marks: Marks) -> str:
    """Of the text without reasoning in front of it."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        options: Any = {"whitespace_pattern": _JSON_WHITESPACE}
        return str(llguidance.LLMatcher.grammar_from_json_schema(grammar.text, overrides=options))
    form: Any = grammar.kind.value
    text = grammar.text
    if grammar.kind is GrammarKind.LARK:
        text = marks.resolve(text)
    return str(llguidance.grammar_from(form, text))


def _refused(grammar: Grammar, reason: str) -> UserError:
    return UserError(f"{grammar.field} can't be used: {_reason(reason)}", field=grammar.field)


def _too_slow(reason: str) -> UserError:
    return UserError(f"the grammar failed while generating: {reason}", field="grammar")


def _reason(message: str) -> str:
    """The library's message on one line."""
    text = " ".join(message.replace("<non-verbose/>", "").split())
    return text if len(text) <= _MAX_REASON_CHARS else text[:_MAX_REASON_CHARS] + "..."
