"""The exact bytes of TGI's answers, from token events to response bodies."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from lmi_core.engine.outputs import FinishReason, PromptToken, TokenEvent, TokenLogprob
from lmi_core.errors import CapacityError, EngineError, UserError
from lmi_server.dialects.tgi.compact_json import number
from lmi_server.dialects.tgi.errors import IncompleteGeneration, error_object
from lmi_server.dialects.tgi.events import Answer, JsonRenderer, SseRenderer, Timing
from tests.engine.harness import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS_ID = min(TOKENIZER.special_ids)
EOS = TOKENIZER.token_text(EOS_ID)


def answer(**values: Any) -> Answer:
    values = {"max_new_tokens": 20, "num_prompt_tokens": 5, **values}
    timing = Timing(started_s=0.0, validated_s=0.0)
    return Answer(tokenizer=TOKENIZER, timing=timing, **values)


def event(number: int, text: str, **values: Any) -> TokenEvent:
    values = {"token_id": 263 + number, "logprob": -1.09, **values}
    return TokenEvent(request_id="r", choice=0, text=text, num_generated_tokens=number, **values)


def streamed(events: list[TokenEvent], **values: Any) -> bytes:
    renderer = SseRenderer(answer(**values))
    return b"".join([*(renderer.feed(0, [e]) for e in events), renderer.finish()])


def whole(*sequences: list[TokenEvent], **values: Any) -> bytes:
    renderer = JsonRenderer(answer(num_sequences=len(sequences), **values))
    for index, events in enumerate(sequences):
        renderer.feed(index, events)
    return renderer.finish()


def test_stream() -> None:
    events = [event(1, " a"), event(2, "é", finish_reason=FinishReason.LENGTH)]
    assert streamed(events).decode() == (
        'data: {"index":1,"token":{"id":264,"text":" a","logprob":-1.09,"special":false},'
        '"generated_text":null,"details":null}\n\n'
        'data: {"index":2,"token":{"id":265,"text":"é","logprob":-1.09,"special":false},'
        '"generated_text":" aé","details":null}\n\n'
    )


def test_last_event_with_details_and_prompt() -> None:
    events = [event(1, ' "x"\n', finish_reason=FinishReason.EOS, seed=2**63)]
    assert streamed(events, details=True, prefix="Say").decode() == (
        'data: {"index":1,"token":{"id":264,"text":" \\"x\\"\\n","logprob":-1.09,"special":false},'
        '"generated_text":"Say \\"x\\"\\n","details":{"finish_reason":"eos_token",'
        '"generated_tokens":1,"seed":9223372036854775808,"input_length":5}}\n\n'
    )


def test_top_tokens_stand_between_token_and_text() -> None:
    top = (TokenLogprob(264, " a", -1.09), TokenLogprob(EOS_ID, EOS, -2.5))
    events = [event(1, " a", top=top), event(2, " b", finish_reason=FinishReason.LENGTH)]
    first = streamed(events, top_tokens=True).split(b"\n\n")[0].decode()
    assert first == (
        'data: {"index":1,"token":{"id":264,"text":" a","logprob":-1.09,"special":false},'
        '"top_tokens":[{"id":264,"text":" a","logprob":-1.09,"special":false},'
        f'{{"id":{EOS_ID},"text":{json.dumps(EOS)},"logprob":-2.5,"special":true}}],'
        '"generated_text":null,"details":null}'
    )


def test_special_tokens_show_in_tokens_only() -> None:
    end = event(2, "", token_id=EOS_ID, special=True, finish_reason=FinishReason.EOS)
    *_, last = streamed([event(1, " a"), end]).strip().split(b"\n\n")
    frame = json.loads(last.removeprefix(b"data: "))
    assert frame["token"]["text"] == EOS
    assert frame["generated_text"] == " a"


def test_errors_in_mid_stream() -> None:
    renderer = SseRenderer(answer())
    renderer.feed(0, [event(1, " a")])
    assert renderer.error(EngineError("no such kernel")) == (
        b'data: {"error":"Request failed during generation: Server error: no such kernel",'
        b'"error_type":"generation"}\n\n'
    )


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (2, b'{"error":"Incomplete generation","error_type":"incomplete_generation"}'),
        (
            3,
            b'{"error":"Incomplete generation stream","error_type":"incomplete_generation_stream"}',
        ),
    ],
)
def test_a_stream_without_an_end_says_so(version: int, expected: bytes) -> None:
    assert streamed([event(1, " a")], version=version).endswith(b"data: " + expected + b"\n\n")


def test_an_aborted_sequence_is_incomplete() -> None:
    with pytest.raises(IncompleteGeneration):
        whole([event(1, "", token_id=-1, finish_reason=FinishReason.ABORT)])


def test_object() -> None:
    events = [event(1, " a"), event(2, " b", finish_reason=FinishReason.LENGTH)]
    assert whole(events) == b'{"generated_text":" a b"}'
    assert whole(events, as_list=True, prefix="He") == b'[{"generated_text":"He a b"}]'


def test_details() -> None:
    prompt = TokenEvent(
        request_id="r",
        choice=0,
        token_id=-1,
        text="",
        prompt=(PromptToken(7, "He", None), PromptToken(8, " is", -0.5)),
    )
    events = [prompt, event(1, " a", finish_reason=FinishReason.LENGTH)]
    assert whole(events, details=True, prefill=True).decode() == (
        '{"generated_text":" a","details":{"finish_reason":"length","generated_tokens":1,'
        '"seed":null,"prefill":[{"id":7,"text":"He","logprob":null},'
        '{"id":8,"text":" is","logprob":-0.5}],'
        '"tokens":[{"id":264,"text":" a","logprob":-1.09,"special":false}]}}'
    )


def test_top_tokens_have_one_list_per_token() -> None:
    top = (TokenLogprob(264, " a", -1.09),)
    events = [event(1, " a", top=top, finish_reason=FinishReason.LENGTH)]
    details = json.loads(whole(events, details=True, top_tokens=True))["details"]
    assert list(details)[-1] == "top_tokens"
    assert details["top_tokens"] == [
        [{"id": 264, "text": " a", "logprob": -1.09, "special": False}]
    ]


def test_best_of_compares_mean_log_probabilities() -> None:
    long = [
        event(1, " a", logprob=-0.5),
        event(2, " b", logprob=-1.5, finish_reason=FinishReason.LENGTH, seed=1),
    ]
    short = [event(1, " c", logprob=-1.25, finish_reason=FinishReason.EOS, seed=2)]
    details = json.loads(whole(short, long, details=True))["details"]
    assert (details["generated_tokens"], details["seed"]) == (2, 1)
    [other] = details["best_of_sequences"]
    assert list(other) == [
        "generated_text",
        "finish_reason",
        "generated_tokens",
        "seed",
        "prefill",
        "tokens",
    ]
    assert (other["generated_text"], other["finish_reason"]) == (" c", "eos_token")


def test_equal_means_keep_the_first_to_end() -> None:
    first = [event(1, " a", finish_reason=FinishReason.EOS)]
    second = [event(1, " b", finish_reason=FinishReason.EOS)]
    assert whole(first, second) == b'{"generated_text":" a"}'


@pytest.mark.parametrize("reason", [FinishReason.EOS, FinishReason.STOP])
def test_length_wins_over_other_reasons(reason: FinishReason) -> None:
    events = [event(1, " a", finish_reason=reason)]
    details = json.loads(whole(events, details=True, max_new_tokens=1))["details"]
    assert details["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (-1.0900000333786011, "-1.09"),
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (-3.0, "-3.0"),
        (-1.1920928955078125e-07, "-1.1920929e-7"),
        (-9.999999747378752e-06, "-0.00001"),
        (-0.00012345, "-0.00012345"),
        (None, "null"),
        (float("-inf"), "null"),
        (float("nan"), "null"),
    ],
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_numbers_are_the_shortest_that_give_the_float_back() -> None:
    rng = np.random.default_rng(3)
    for value in -(10 ** rng.uniform(-4, 7, 3000)).astype(np.float32):
        text = number(float(value))
        assert np.float32(text) == value
        assert text == np.format_float_positional(value, unique=True, trim="0")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (CapacityError("full"), '{"error":"Model is overloaded","error_type":"overloaded"}'),
        (
            UserError("`inputs` cannot be empty"),
            '{"error":"Input validation error: `inputs` cannot be empty",'
            '"error_type":"validation"}',
        ),
    ],
)
def test_error_objects(error: Exception, text: str) -> None:
    assert error_object(error).decode() == text
