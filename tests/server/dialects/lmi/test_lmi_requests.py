"""What a request body in LMI's format means, and which bodies are refused."""

from __future__ import annotations

from typing import Any

import pytest

from lmi_core.engine.logits_processors import LogitsProcessors
from lmi_core.errors import UserError
from lmi_server.dialects.base import ParsedCall
from lmi_server.dialects.unknown_fields import IGNORED_HEADER
from tests.server.dialects.lmi.test_lmi_formats import parameters, parse


def test_defaults() -> None:
    params = parse({"inputs": "x"}).requests[0].params
    assert (params.max_new_tokens, params.temperature, params.n) == (30, 0.0, 1)


@pytest.mark.parametrize(
    ("values", "temperature"),
    [
        ({}, 0.0),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, 0.0),
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"temperature": 0.7}, 0.7),
        ({"temperature": 0}, 0.0),
        ({"top_p": 0.9}, 1.0),
        ({"typical_p": 0.9}, 1.0),
        ({"epsilon_cutoff": 0.01}, 1.0),
        ({"temperature": None, "top_k": None}, 0.0),
    ],
)
def test_when_a_request_samples(values: dict[str, Any], temperature: float) -> None:
    assert parse(parameters(**values)).requests[0].params.temperature == temperature


def test_every_parameter_arrives() -> None:
    params = (
        parse(
            parameters(
                do_sample=True,
                seed="42",
                top_k=-1,
                top_p=0.5,
                min_p=0.1,
                typical_p=0.8,
                repetition_penalty=1.1,
                presence_penalty=0.2,
                frequency_penalty=0.3,
                stop_sequences=["x"],
                stop="y",
                stop_token_ids=[5],
                min_tokens=2,
                ignore_eos_token=True,
                include_stop_str_in_output=True,
                skip_special_tokens=False,
                details=True,
                logprobs=4,
            )
        )
        .requests[0]
        .params
    )
    assert (params.seed, params.top_k, params.top_p, params.min_p) == (42, 0, 0.5, 0.1)
    assert params.typical_p == 0.8
    assert (params.repetition_penalty, params.presence_penalty) == (1.1, 0.2)
    assert (params.frequency_penalty, params.min_new_tokens) == (0.3, 2)
    assert (params.stop, params.stop_token_ids) == (("x", "y"), (5,))
    assert (params.ignore_eos, params.include_stop, params.skip_special_tokens) == (
        True,
        True,
        False,
    )
    assert params.logprobs == 4


def test_logprobs_are_computed_only_when_shown() -> None:
    assert parse(parameters()).requests[0].params.logprobs is None
    assert parse({**parameters(), "stream": True}).requests[0].params.logprobs == 0


def test_unknown_parameters_are_dropped_and_named() -> None:
    parsed = parse(parameters(no_such=1, **{"x\r\ny": 2}))
    assert parsed.renderer.headers == {IGNORED_HEADER: "no_such"}


def test_fields_at_the_wrong_place_are_ignored_and_named() -> None:
    parsed = parse({**parameters(no_such=1), "max_new_tokens": 3, "details": True})
    assert parsed.renderer.headers == {IGNORED_HEADER: "details, max_new_tokens, no_such"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"inputs":', "not valid JSON"),
        (b'{"inputs": "\xff"}', "not valid UTF-8: byte 12 is invalid"),
        (b'{"inputs": "a"} x', "trailing characters"),
        (b'{"inputs": "a", "parameters": {"x": ' + b"[" * 100_000, "nested too deeply"),
        (b"[]", "the body must be object, got array"),
        ({}, "needs the field inputs"),
        ({"inputs": ""}, "inputs is empty"),
        ({"inputs": []}, "inputs is empty"),
        ({"inputs": ["a"] * 257}, "at most 256"),
        ({"inputs": 3}, "inputs must be str | array | null, got int"),
        ({"inputs": "a", "stream": "yes"}, "stream must be bool"),
        ({"inputs": "a", "parameters": []}, "parameters must be object"),
        (parameters(top_k="3"), "parameters.top_k must be int | null, got str"),
        (parameters(stop_token_ids=["x"]), "parameters.stop_token_ids[0] must be int, got str"),
        (parameters(seed="x"), "parameters.seed must be an integer, got 'x'"),
        (parameters(temperature=-1), "parameters.temperature must be at least 0, got -1"),
        (parameters(logprobs=-1), "parameters.logprobs must be at least 0, got -1"),
        (parameters(top_n_tokens=-2), "parameters.top_n_tokens must be at least 0, got -2"),
        (parameters(min_tokens=4), "min_tokens must be between 0 and max_new_tokens (3), got 4"),
        (parameters(min_tokens=-1), "parameters.min_tokens must be between 0 and"),
        (parameters(truncate=0), "parameters.truncate must be at least 1, got 0"),
        (parameters(n=0), "n must be between 1 and 128"),
        (parameters(n=3, best_of=2), "parameters.best_of must be between n (3) and 128, got 2"),
        (parameters(best_of=129), "parameters.best_of must be between 1 and 128, got 129"),
        (parameters(n=1, best_of=129), "parameters.best_of must be between n (1) and 128, got 129"),
        ({**parameters(n=2), "stream": True}, "only one sequence can be streamed"),
        (
            {**parameters(n=1, best_of=2), "stream": True},
            "best_of or num_beams is 2, but only one sequence can",
        ),
        ({"inputs": ["a", "b"], "stream": True}, "only one can be streamed"),
        ({"inputs": "a", "adapters": "french"}, "'french'"),
        (parameters(decoding_strategy="beams"), "must be greedy, sample or contrastive, got"),
        (parameters(min_new_tokens=4), "min_new_tokens must be between 0 and max_new_tokens (3)"),
        (parameters(min_new_tokens=-1), "min_new_tokens must be at least 0, got -1"),
        (parameters(min_length=5), "min_length must be between 0 and max_new_tokens (3), got 5"),
        (parameters(no_repeat_ngram_size=-1), "no_repeat_ngram_size must be at least 0, got -1"),
        (parameters(logit_bias={"x": 1}), "logit_bias has the keys 'x'; keys are token ids"),
        (parameters(num_beams=129), "parameters.num_beams must be between 1 and 128, got 129"),
        (parameters(num_return_sequences=0), "parameters.num_return_sequences must be between 1"),
        (parameters(num_beams=4, best_of=3), "parameters.best_of is 3, but parameters.num_beams"),
        ({**parameters(num_beams=4), "stream": True}, "num_beams is 4, but only one sequence can"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": "x"}]}, "has no chat template"),
    ],
)
def test_bad_bodies(body: dict[str, Any] | bytes, words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(body)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("spaces_between_special_tokens", False),
    ],
)
def test_parameters_without_a_mechanism_are_refused(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"parameters.{name} is not available in this version"):
        parse(parameters(**{name: value}))


def test_neutral_values_of_those_are_accepted() -> None:
    parse(parameters(num_beams=1, watermark=False, spaces_between_special_tokens=True))


def test_bans_and_biases_by_their_names() -> None:
    names = {"bad_words": ["a"], "bad_sequences": ["b"], "bad_words_ids": [[1, 2]]}
    asked = parameters(
        **names, min_length=1, min_new_tokens=2, no_repeat_ngram_size=3, logit_bias={"7": -1.5}
    )
    params = parse(asked).requests[0].params
    assert (params.bad_words, params.bad_words_ids) == (("a", "b"), ((1, 2),))
    assert (params.min_new_tokens, params.no_repeat_ngram_size) == (2, 3)
    assert params.logit_bias == ((7, -1.5),)


def test_logits_processors_by_their_names() -> None:
    asked = parameters(
        suppress_tokens=[3],
        begin_suppress_tokens=[4],
        forced_bos_token_id=5,
        forced_eos_token_id=6,
        encoder_no_repeat_ngram_size=2,
        sequence_bias=[[[1, 2], 9.0], [[7], 2], [[1, 2], -1.5]],
        exponential_decay_length_penalty=[4, 1.5],
        encoder_repetition_penalty=2,
        epsilon_cutoff=0.01,
        eta_cutoff=0.02,
    )
    params = parse(asked).requests[0].params
    assert params.banned_token_ids == (3,)
    assert params.processors == LogitsProcessors(
        begin_suppress_tokens=(4,),
        forced_bos_token_id=5,
        forced_eos_token_id=(6,),
        encoder_no_repeat_ngram_size=2,
        sequence_bias=(((1, 2), -1.5), ((7,), 2.0)),
        exponential_decay_length_penalty=(4, 1.5),
        encoder_repetition_penalty=2.0,
        epsilon_cutoff=0.01,
        eta_cutoff=0.02,
    )
    assert parse(parameters(forced_eos_token_id=[6, 7])).requests[0].params.processors is not None
    assert parse(parameters()).requests[0].params.processors is None


def test_watermarks() -> None:
    options = {"watermark_gamma": 0.25, "watermark_delta": 3.0}
    params = parse(parameters(watermark=True), **options).requests[0].params
    assert (params.watermark_gamma, params.watermark_delta) == (0.25, 3.0)
    assert parse(parameters(), **options).requests[0].params.watermark_delta == 0.0


@pytest.mark.parametrize("inside", [False, True])
def test_a_cached_prompt_comes_first_where_it_is_to_be_cached(inside: bool) -> None:
    def ask(**more: Any) -> ParsedCall:
        body = parameters(**more)
        (body["parameters"] if inside else body)["cached_prompt"] = "Once "
        return parse({**body, "inputs": "upon"})

    assert ask(use_lru_kv_cache=True).requests[0].prompt == "Once upon"
    ignored = ask()
    assert ignored.requests[0].prompt == "upon"
    assert ignored.renderer.headers[IGNORED_HEADER] == "cached_prompt"


@pytest.mark.parametrize(
    ("asked", "beams", "n"),
    [
        ({"num_beams": 4}, 4, 4),
        ({"num_beams": 4, "n": 2}, 4, 2),
        ({"num_beams": 4, "num_return_sequences": 1}, 4, 1),
        ({"use_beam_search": True, "best_of": 3}, 3, 3),
        ({"use_beam_search": True, "best_of": 3, "n": 2}, 3, 2),
        ({"use_beam_search": True, "n": 2}, 2, 2),
        ({"use_beam_search": True}, 1, 1),
    ],
)
def test_beams(asked: dict[str, Any], beams: int, n: int) -> None:
    more = {"length_penalty": 0.5, "early_stopping": "never"}
    params = parse(parameters(**asked, **more)).requests[0].params
    assert (params.num_beams, params.n) == (beams, n)
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")


def test_content_types() -> None:
    assert parse(b"Once upon", "text/plain; charset=utf-8").requests[0].prompt == "Once upon"
    body = b'{"inputs": "a"}'
    assert parse(body, "").requests[0].prompt == "a"
    assert parse(body, "application/x-www-form-urlencoded").requests[0].prompt == "a"
    with pytest.raises(UserError, match="image/png"):
        parse(b"\x89PNG", "image/png")
    with pytest.raises(UserError, match="byte 1"):
        parse(b"a\xff", "text/plain")
