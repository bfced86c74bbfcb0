"""Receipts asked again, of an engine in this process or of a server, and compared to the bit."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from lmi_core.chat.answer import RemoteSource
from lmi_core.engine.engine import Engine
from lmi_core.engine.fingerprint import PARTS, differing_parts
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.request import GenerationRequest
from lmi_core.errors import UserError
from lmi_core.receipts.receipt import Answers, Choice, Receipt, finite
from lmi_core.structured.grammar import Grammar, GrammarKind

_LEAST_LOGPROB = -9999.0
"""What OpenAI's protocol writes for one that isn't finite."""
_GRAMMARS = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.CHOICE: "choice",
    GrammarKind.CONTEXT_FREE: "grammar",
}
"""Names that the OpenAI protocol's extension has for them."""
_SAID = frozenset(
    (
        *("max_new_tokens", "min_new_tokens", "ignore_eos", "seed", "n", "logprobs"),
        *("temperature", "top_k", "top_p", "min_p", "typical_p"),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
        *("stop", "include_stop", "stop_token_ids", "skip_special_tokens", "bad_words"),
        *("logit_bias", "allowed_token_ids", "grammar"),
        *("num_beams", "length_penalty", "early_stopping"),
        "prompt_logprobs",  # they change no token of the answer
    )
)
"""Parameters that a body of completions has."""
_SAID_AS = {"banned_token_ids": "suppress_tokens", "watermark_delta": "watermark"}
_ENDS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop"}


class Replayed(NamedTuple):
    """What a receipt's request was answered now."""

    choices: list[Choice]
    fingerprint: str | None
    adapter_digest: str | None
    """None: it isn't told."""


class Source(Protocol):
    """Where receipts are asked again."""

    async def ask(self, receipt: Receipt, number: int) -> Replayed:
        """``number`` is no other receipt's. Raises LmiError."""
        ...


class LocalEngine:
    """An engine of this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def ask(self, receipt: Receipt, number: int) -> Replayed:
        params = receipt.sampling_params()
        if all(choice.is_cut_off for choice in receipt.choices):
            params = replace(params, max_new_tokens=receipt.num_tokens, min_new_tokens=0)
        answers = Answers()
        request = GenerationRequest(
            request_id=f"replay-{number}",
            prompt_token_ids=tuple(receipt.prompt_token_ids),
            params=replace(params, logprobs=params.logprobs or 0),
            adapter=receipt.adapter,
        )
        async for event in self._engine.generate(request):
            answers.add(event)
        choices = answers.so_far(params.n)
        digest = self._engine.adapter_digest(receipt.adapter)
        return Replayed(choices, self._engine.fingerprint, digest)


class RemoteServer:
    """A server, by OpenAI's protocol with the extensions that open servers have."""

    def __init__(self, source: RemoteSource) -> None:
        self._source = source

    async def ask(self, receipt: Receipt, number: int) -> Replayed:
        body = completion_body(receipt, self._source.model)
        answer = await asyncio.to_thread(self._post, body)
        choices = [_choice(choice) for choice in answer["choices"]]
        return Replayed(choices, answer.get("system_fingerprint"), None)

    def _post(self, body: dict[str, Any]) -> Any:
        with closing(self._source.ask("POST", "/v1/completions", body)) as answer:
            return json.load(answer)


def completion_body(receipt: Receipt, model: str) -> dict[str, Any]:
    """The receipt's request for ``/v1/completions``; UserError where that has no words for it."""
    params = receipt.sampling_params()
    # Without a text that ends the answer, which special tokens it shows changes no token.
    said = _SAID if params.stop else _SAID | {"kept_special_tokens"}
    if unsaid := sorted(receipt.params.keys() - said):
        names = ", ".join(_SAID_AS.get(name, name) for name in unsaid)
        raise UserError(f"completions can't be asked for {names}: replay it without --url")
    structured = _structured(params.grammar)
    is_cut_off = all(choice.is_cut_off for choice in receipt.choices)
    body = {
        "model": receipt.adapter or model,
        "prompt": receipt.prompt_token_ids,
        "max_tokens": (not is_cut_off and params.max_new_tokens) or receipt.num_tokens,
        "min_tokens": 0 if is_cut_off else params.min_new_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k or -1,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": params.typical_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "seed": params.seed,
        "n": params.n,
        "stop": params.stop,
        "include_stop_str_in_output": params.include_stop,
        "stop_token_ids": params.stop_token_ids,
        "ignore_eos": params.ignore_eos,
        "logit_bias": {str(token_id): bias for token_id, bias in params.logit_bias},
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "no_repeat_ngram_size": params.no_repeat_ngram_size,
        "structured_outputs": structured,
        "skip_special_tokens": params.skip_special_tokens,
        "logprobs": params.logprobs or 0,
        "return_token_ids": True,
    }
    if params.num_beams > 1:
        searched = ("num_beams", "length_penalty", "early_stopping")
        body |= {name: getattr(params, name) for name in searched}
    return {name: value for name, value in body.items() if value is not None}


def _structured(grammar: Grammar | None) -> dict[str, Any] | None:
    if grammar is None:
        return None
    if grammar.kind not in _GRAMMARS:
        raise UserError("the grammar of a tool call can't be asked for over HTTP: replay it here")
    is_list = grammar.kind is GrammarKind.CHOICE
    return {_GRAMMARS[grammar.kind]: json.loads(grammar.text) if is_list else grammar.text}


def _choice(answer: dict[str, Any]) -> Choice:
    logprobs = [None if p == _LEAST_LOGPROB else p for p in answer["logprobs"]["token_logprobs"]]
    ids = answer["token_ids"]
    return Choice(
        num_tokens=len(ids),
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=answer["finish_reason"],
    )


def first_difference(receipt: Receipt, replayed: Replayed) -> str | None:
    """Where a replayed answer departs from the recorded one first, and why it may; None: tokens,
    log-probabilities and ends are equal."""
    what = _difference(receipt.choices, replayed.choices)
    return None if what is None else f"{what}; {_why(receipt, replayed)}"


def _difference(then: list[Choice], now: list[Choice]) -> str | None:
    if len(then) != len(now):
        return f"{len(then)} choices were recorded, {len(now)} came"
    for index, (a, b) in enumerate(zip(then, now, strict=True)):
        if (what := _difference_of_choice(a, b)) is not None:
            return f"choice {index}, {what}" if len(then) > 1 else what
    return None


def _difference_of_choice(then: Choice, now: Choice) -> str | None:
    pairs = zip(then.token_ids, now.token_ids, then.logprobs, now.logprobs, strict=False)
    for position, (a, b, a_logprob, b_logprob) in enumerate(pairs):
        if a != b:
            return f"token {position}: {a} was recorded, {b} came"
        if a_logprob != finite(b_logprob):
            far = "" if a_logprob is None or b_logprob is None else _distance(a_logprob, b_logprob)
            return (
                f"token {position}: log-probability {a_logprob} was recorded, {b_logprob} came{far}"
            )
    if then.is_cut_off and len(now.token_ids) >= len(then.token_ids):
        return None
    if len(then.token_ids) != len(now.token_ids):
        return f"{len(then.token_ids)} tokens were recorded, {len(now.token_ids)} came"
    if _end(then.finish_reason) != _end(now.finish_reason):
        return f"its end was {then.finish_reason}, now it is {now.finish_reason}"
    return None


def _distance(a: float, b: float) -> str:
    return f" ({math.fabs(a - b):.1e} apart)"


def _end(reason: str | None) -> str | None:
    """In OpenAI's words, which tell fewer ends apart."""
    return _ENDS.get(FinishReason(reason), reason) if reason in list(FinishReason) else reason


def _why(receipt: Receipt, replayed: Replayed) -> str:
    causes = []
    if receipt.fingerprint is None or replayed.fingerprint is None:
        whose = "recorded" if receipt.fingerprint is None else "present"
        causes.append(f"the {whose} fingerprint isn't known")
    elif parts := differing_parts(receipt.fingerprint, replayed.fingerprint):
        causes.append(f"other {' and '.join(parts)} than then")
    if replayed.adapter_digest is None:
        if receipt.adapter:
            causes.append(f"whether adapter {receipt.adapter} is the same isn't known")
    elif replayed.adapter_digest != receipt.adapter_digest:
        causes.append(f"adapter {receipt.adapter or 'by default'} has other files than then")
    same = f"{', '.join(PARTS[:-1])} and {PARTS[-1]} are the same, so this is a fault: report it"
    return "; ".join(causes) or same
