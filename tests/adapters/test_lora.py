"""LoRA adapters of an engine: loading, unloading, what requests get and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmi_core.engine.engine import Engine
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.request import GenerationRequest
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import EngineError, ModelError, UserError
from lmi_core.settings.engine_config import EngineConfig
from lmi_core.settings.lora_config import LoraConfig
from tests.checkpoints import cached_checkpoint
from tests.engine.fake_runner import FakeRunner
from tests.engine.harness import (
    assert_nothing_leaked,
    collect,
    make_engine,
    run,
    token_ids,
    until,
)
from tests.lora_adapters import cached_adapter

PROMPT = list(range(40))
GREEDY = SamplingParams(max_new_tokens=8, ignore_eos=True, logprobs=2)


def fake_runner(**settings: Any) -> FakeRunner:
    return FakeRunner(has_adapters=True, **settings)


def config_of(model: Path, **changes: object) -> EngineConfig:
    settings = {
        "model": model,
        "max_model_len": 128,
        "block_size": 16,
        "max_num_seqs": 4,
        "kv_cache_bytes": 4 << 20,
        "num_threads": 1,
        "lora": LoraConfig(),
        **changes,
    }
    return EngineConfig(**settings)  # type: ignore[arg-type]


def test_requests_get_the_adapter_that_they_name() -> None:
    model = cached_checkpoint("llama3")
    paths = {name: cached_adapter("llama3", seed) for seed, name in enumerate("ab")}

    async def main() -> None:
        config = config_of(model, lora=LoraConfig(adapters=(("a", paths["a"]),)))
        async with Engine(config) as engine:
            assert engine.adapters == {"a": paths["a"]}
            await engine.load_adapter("b", str(paths["b"]))
            assert list(engine.adapters.items()) == list(paths.items())
            names = ["", "a", "b", "a", ""]
            outcomes = await asyncio.gather(
                *(collect(engine, PROMPT, GREEDY, adapter=name) for name in names)
            )
            by_name = dict(zip(names, outcomes, strict=True))
            assert len({tuple(token_ids(events)) for events in by_name.values()}) == 3
            for name, events in zip(names, outcomes, strict=True):
                assert [e.logprob for e in events] == [e.logprob for e in by_name[name]]
            await assert_nothing_leaked(engine)

    run(main())


def test_choices_and_prompt_scores_are_the_adapters() -> None:
    model, path = cached_checkpoint("qwen3"), cached_adapter("qwen3")
    params = SamplingParams(
        max_new_tokens=5, n=3, temperature=1.0, seed=4, prompt_logprobs=1, ignore_eos=True
    )

    async def scores(adapters: tuple[tuple[str, Path], ...], name: str) -> list[object]:
        async with Engine(config_of(model, lora=LoraConfig(adapters=adapters))) as engine:
            events = await collect(engine, PROMPT, params, adapter=name)
            prompts = [[p.logprob for p in e.prompt] for e in events if e.prompt is not None]
            return [prompts, [token_ids(events, choice) for choice in range(3)]]

    async def main() -> None:
        adapted = await scores((("a", path),), "a")
        assert adapted == await scores((("b", cached_adapter("qwen3", 5)), ("a", path)), "a")
        assert adapted != await scores((), "")

    run(main())


def test_a_name_that_is_loaded_again_never_finds_old_blocks() -> None:
    async def main() -> None:
        async with make_engine(fake_runner()) as engine:
            for _ in range(3):
                await engine.load_adapter("a", "somewhere")
                first = await collect(engine, PROMPT, GREEDY, adapter="a")
                again = await collect(engine, PROMPT, GREEDY, adapter="a")
                assert first[0].num_cached_tokens == 0
                assert again[0].num_cached_tokens == 32
                await engine.unload_adapter("a")
            base = await collect(engine, PROMPT, GREEDY)
            assert base[0].num_cached_tokens == 0

    run(main())


def test_an_adapter_also_guards_blocks_filled_by_output() -> None:
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)

    async def main() -> None:
        async with make_engine(fake_runner()) as engine:
            await engine.load_adapter("a", "somewhere")
            await engine.load_adapter("b", "elsewhere")
            events = await collect(engine, [1, 2], params, adapter="a")
            known = [1, 2, *token_ids(events)]
            for name, num_cached in (("b", 0), ("", 0), ("a", 16)):
                (event, *_) = await collect(engine, known, params, adapter=name)
                assert event.num_cached_tokens == num_cached

    run(main())


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_unloading_waits_for_running_requests_and_refuses_new_ones(runs_ahead: bool) -> None:
    async def main() -> None:
        runner = fake_runner(step_s=0.001, runs_ahead=runs_ahead)
        params = SamplingParams(max_new_tokens=60, ignore_eos=True)
        async with make_engine(runner) as engine:
            await engine.load_adapter("a", "somewhere")
            running = asyncio.create_task(collect(engine, PROMPT, params, adapter="a"))
            await until(lambda: engine.stats().num_running == 1)
            unloading = asyncio.create_task(engine.unload_adapter("a"))
            await until(lambda: not engine.adapters)
            with pytest.raises(UserError, match="Adapter a is not registered"):
                await collect(engine, PROMPT, params, adapter="a")
            await engine.load_adapter("a", "another")
            assert not unloading.done()
            events = await collect(engine, PROMPT, GREEDY, adapter="a")
            assert events[0].num_cached_tokens == 0
            assert len(token_ids(await running)) == 60
            await unloading
            assert [adapter.number for adapter in runner.adapters.by_slot.values()] == [2]
            await assert_nothing_leaked(engine)

    run(main())


def test_unloading_goes_on_when_nobody_waits_for_it() -> None:
    async def main() -> None:
        runner = fake_runner(step_s=0.001)
        params = SamplingParams(max_new_tokens=30, ignore_eos=True)
        async with make_engine(runner) as engine:
            await engine.load_adapter("a", "somewhere")
            running = asyncio.create_task(collect(engine, PROMPT, params, adapter="a"))
            await until(lambda: engine.stats().num_running == 1)
            unloading = asyncio.create_task(engine.unload_adapter("a"))
            await until(lambda: not engine.adapters)
            unloading.cancel()
            await asyncio.gather(unloading, return_exceptions=True)
            assert runner.adapters.by_slot
            await running
            await until(lambda: not runner.adapters.by_slot)

    run(main())


def test_aborted_requests_let_go_of_their_adapter() -> None:
    async def main() -> None:
        runner = fake_runner(step_s=0.001, max_num_seqs=1)
        params = SamplingParams(max_new_tokens=200, n=2, temperature=1.0, ignore_eos=True)
        async with make_engine(runner) as engine:
            await engine.load_adapter("a", "somewhere")
            tasks = [
                asyncio.create_task(
                    collect(engine, [i], params, adapter="a", request_id=f"request-{i}")
                )
                for i in range(3)
            ]
            await until(lambda: engine.stats().num_waiting == 2)
            unloading = asyncio.create_task(engine.unload_adapter("a"))
            await until(lambda: not engine.adapters)
            for i in range(3):
                engine.abort(f"request-{i}")
            await unloading
            assert not runner.adapters.by_slot
            for events in await asyncio.gather(*tasks):
                assert events[-1].finish_reason is FinishReason.ABORT

    run(main())


def test_failed_steps_let_go_of_their_adapter() -> None:
    async def main() -> None:
        runner = fake_runner()
        async with make_engine(runner) as engine:
            await engine.load_adapter("a", "somewhere")
            runner.fail_step = lambda number: "on purpose"
            with pytest.raises(EngineError, match="on purpose"):
                await collect(engine, PROMPT, GREEDY, adapter="a")
            await engine.unload_adapter("a")
            assert not runner.adapters.by_slot

    run(main())


Action = Callable[[Engine], Any]
REFUSED: list[tuple[Action, type[Exception], str]] = [
    (
        lambda e: collect(e, PROMPT, adapter="c"),
        UserError,
        "Adapter c is not registered; registered are a, b",
    ),
    (
        lambda e: collect(e, GenerationRequest(request_id="r", prompt="x", adapter=None)),  # type: ignore[arg-type]
        UserError,
        "adapter is None; allowed are str",
    ),
    (lambda e: e.load_adapter("a", "x"), UserError, "Adapter a is registered already"),
    (lambda e: e.load_adapter("", "x"), UserError, "an adapter's name is a text, not ''"),
    (lambda e: e.load_adapter("d", "broken"), ModelError, "broken is broken"),
    (lambda e: e.unload_adapter("c"), UserError, "Adapter c is not registered"),
    (lambda e: e.unload_adapter(""), UserError, "the base model can't be unloaded"),
]


@pytest.mark.parametrize(("action", "kind", "message"), REFUSED)
def test_refusals(action: Action, kind: type[Exception], message: str) -> None:
    async def main() -> None:
        async with make_engine(fake_runner()) as engine:
            await engine.load_adapter("a", "somewhere")
            await engine.load_adapter("b", "elsewhere")
            with pytest.raises(kind, match=message) as raised:
                await action(engine)
            if kind is UserError:
                assert raised.value.field == "adapter"  # type: ignore[attr-defined]
            assert list(engine.adapters) == ["a", "b"]
            await engine.load_adapter("d", "somewhere")  # a name that failed is free

    run(main())


def test_without_lora() -> None:
    async def main() -> None:
        async with make_engine() as engine:
            assert engine.adapters == {}
            for action in (
                lambda: collect(engine, PROMPT, adapter="a"),
                lambda: engine.load_adapter("a", "somewhere"),
                lambda: engine.unload_adapter("a"),
            ):
                with pytest.raises(UserError, match="LoRA is not enabled"):
                    await action()

    run(main())


def test_two_loads_of_one_name_at_once() -> None:
    async def main() -> None:
        async with make_engine(fake_runner()) as engine:
            loads = (engine.load_adapter("a", path) for path in ("one", "two"))
            results = await asyncio.gather(*loads, return_exceptions=True)
            assert [type(result) for result in results] == [type(None), UserError]
            assert engine.adapters == {"a": Path("one")}

    run(main())


def test_an_engine_with_a_loop_of_its_own() -> None:
    with make_engine(fake_runner(), own_loop=True) as engine:
        asyncio.run(engine.load_adapter("a", "somewhere"))
        assert list(engine.adapters) == ["a"]
        events = list(engine.generate_sync(PROMPT, GREEDY, adapter="a"))
        assert len(token_ids(events)) == 8
        asyncio.run(engine.unload_adapter("a"))
        assert engine.adapters == {}


def test_a_broken_adapter_ends_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        lora = LoraConfig(adapters=(("a", tmp_path / "nowhere"),))
        with pytest.raises(ModelError, match="nowhere has no adapter_config"):
            async with Engine(config_of(cached_checkpoint("llama3"), lora=lora)):
                pass

    run(main())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_rank": 0}, "max_rank is 0; allowed are 1 to 1024"),
        ({"max_rank": "8"}, "max_rank is '8'; allowed are int"),
        ({"adapters": [("a", Path("x"))]}, "allowed are tuple"),
        ({"adapters": (("", Path("x")),)}, "an adapter's name is a text, not ''"),
        ({"adapters": (("\udce9", Path("x")),)}, "an adapter's name is valid UTF-8, not"),
        ({"adapters": (("a", Path("x")), ("a", Path("y")))}, "2 adapters have the name 'a'"),
    ],
)
def test_configurations_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LoraConfig(**fields)
