"""Whole answers, an engine's repr, and what is refused before anything loads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lmi_core import Completion, Engine, EngineConfig, FinishReason, SamplingParams
from lmi_core.cli import DEMO_MODEL
from lmi_core.engine.completion import check_one_choice, render_chat
from lmi_core.engine.make_request import make_request
from lmi_core.errors import ModelError, UserError
from tests.engine.harness import until


def test_whole_answers_are_the_events_put_together() -> None:
    async def run() -> None:
        async with Engine(DEMO_MODEL) as engine:
            params = SamplingParams(max_new_tokens=6, logprobs=0)
            answer = await engine.complete("Once upon a time", params)
            events = [event async for event in engine.generate("Once upon a time", params)]
            assert answer == Completion.of(events)
            assert str(answer) == "".join(event.text for event in events)
            assert answer.token_ids == tuple(event.token_id for event in events)
            assert (len(answer.logprobs), answer.finish_reason) == (6, FinishReason.LENGTH)
            short = await engine.complete("Once upon a time", params, max_new_tokens=2)
            assert short.token_ids == answer.token_ids[:2]

    asyncio.run(run())


def test_an_aborted_answer_has_the_tokens_before() -> None:
    async def run() -> None:
        async with Engine(DEMO_MODEL) as engine:
            params = SamplingParams(ignore_eos=True, logprobs=0)
            task = asyncio.create_task(engine.complete("Once", params, request_id="mine"))
            await until(lambda: engine.stats().totals.num_generated_tokens >= 5)
            engine.abort("mine")
            answer = await task
            assert answer.finish_reason is FinishReason.ABORT
            assert len(answer.token_ids) == len(answer.logprobs) >= 5
            assert answer.text == engine.decode(answer.token_ids, skip_special_tokens=True)

    asyncio.run(run())


def test_chats_go_through_the_template() -> None:
    with Engine(DEMO_MODEL, own_loop=True) as engine:
        question = "The fox lives in the castle. The owl likes honey. Who likes honey?"
        assert engine.chat_sync(question, max_new_tokens=20).text == "The owl likes honey."
        messages = [{"role": "user", "content": question}]
        answer = asyncio.run(engine.chat(messages, max_new_tokens=20))
        assert answer.text == "The owl likes honey."
        assert engine.complete_sync(question, max_new_tokens=3).text != "The owl likes"


@pytest.mark.parametrize("device", ["cpu", "torch-cpu"])
def test_ranks_of_a_prompts_tokens_are_among_all(device: Any) -> None:
    """However many of the likeliest are asked for."""
    if device != "cpu":
        pytest.importorskip("torch")
    config = EngineConfig(
        model=DEMO_MODEL, max_logprobs=2048, device=device, deterministic=device != "cpu"
    )
    prompt = "The owl likes honey; who likes 7 + 5?"

    async def run() -> None:
        async with Engine(config) as engine:
            asked = [
                SamplingParams(max_new_tokens=1, prompt_logprobs=count) for count in (0, 2, -1)
            ]
            events = [[event async for event in engine.generate(prompt, each)] for each in asked]
            tokens, few, all_of_them = (list(each[0].prompt or ()) for each in events)
            expected = [
                1 + [entry.token_id for entry in token.top].index(token.token_id)
                for token in all_of_them[1:]
            ]
            assert [token.rank for token in tokens] == [None, *expected]
            assert [token.rank for token in few] == [None, *expected]
            assert max(expected) > 2

    asyncio.run(run())


@pytest.mark.parametrize("device", ["cpu", "torch-cpu"])
def test_no_more_log_probabilities_are_made_room_for_than_there_are_tokens(device: Any) -> None:
    if device != "cpu":
        pytest.importorskip("torch")
    config = EngineConfig(model=DEMO_MODEL, max_logprobs=10**9, device=device)
    with Engine(config, own_loop=True) as engine:
        assert engine.info.runner.max_logprobs == 2048
        [event] = engine.generate_sync("Once", max_new_tokens=1, logprobs=-1)
        assert len({entry.token_id for entry in event.top}) == 2048


def test_several_choices_are_no_one_answer() -> None:
    with (
        Engine(DEMO_MODEL, own_loop=True) as engine,
        pytest.raises(UserError, match="return one choice, got n=2; generate gives the events"),
    ):
        engine.complete_sync("x", n=2)
    with pytest.raises(UserError, match="n must be an int, got str '1'"):
        check_one_choice(make_request("x", None, {"n": "1"}, "r"))


def test_repr_says_what_it_is() -> None:
    engine = Engine(DEMO_MODEL, own_loop=True)
    assert repr(engine) == f"<Engine 'model' from {DEMO_MODEL}, created>"
    with engine:
        assert repr(engine).endswith("ready: bf16 on cpu, 2048 tokens, 0 running, 0 waiting>")


def test_a_model_that_is_not_there_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"does not exist; give a directory with config.json"):
        Engine(tmp_path / "nowhere")


@pytest.mark.parametrize("config", [None, 5, {"model": "m"}])
def test_what_is_no_model_is_refused_at_construction(config: Any) -> None:
    with pytest.raises(UserError, match=r"config must be an EngineConfig, or the path of .*, got"):
        Engine(config)


@pytest.mark.parametrize("messages", [None, 5, ["hi"], b"hi", [], [{"content": "hi"}]])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(UserError, match="messages must be a text, or a list of dicts of role and"):
        render_chat(DEMO_MODEL, messages)


def test_options_are_fields_of_the_parameters_or_of_the_request() -> None:
    base = SamplingParams(temperature=0.5, top_k=4)
    request = make_request("x", base, {"top_k": 2, "priority": 3}, "id")
    assert request.params == SamplingParams(temperature=0.5, top_k=2)
    assert (request.priority, request.request_id, request.prompt) == (3, "id", "x")
    assert make_request([1, 2], None, {"request_id": "mine"}, "id").request_id == "mine"
    with pytest.raises(UserError, match=r"no option temprature; allowed are .*temperature"):
        make_request("x", None, {"temprature": 1}, "id")
