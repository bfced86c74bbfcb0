"""The vLLM adapter against a scripted vLLM with the library's names and shapes."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lmi_core.backends.open_backend import open_backend
from lmi_core.config.resolve import resolve
from lmi_core.config.targets.host import Host
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.stats import NullObserver
from lmi_core.errors import (
    CapacityError,
    ConfigError,
    EngineError,
    MissingExtraError,
    ModelError,
    UserError,
)
from lmi_core.settings.library_config import LibraryConfig
from lmi_core.settings.lora_config import LoraConfig
from lmi_core.structured.grammar import Grammar
from tests.backends import library
from tests.backends.library import events_of, forget, imported, model_with, request
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import run

HOST = Host(packages=frozenset({"vllm"}))


@pytest.fixture
def vllm(monkeypatch):
    """The scripted library, importable as vllm; returns its engine class."""
    for module in imported(monkeypatch, "fake_vllm", "vllm", "vllm.v1.engine.async_llm"):
        yield module.AsyncLLM


def config(**more):
    arguments = more.pop("arguments", {})
    model = cached_checkpoint("llama2")
    return LibraryConfig(backend="vllm", model=model, arguments=arguments, **more)


def served(asked, **settings):
    return library.served(asked, config(**settings))


def test_deltas_become_events(vllm):
    events = served(request(logprobs=1))
    assert [event.token_id for event in events] == [31, 32, 33, 34, 35]
    assert [event.finish_reason for event in events] == [None] * 4 + [FinishReason.LENGTH]
    assert [event.num_generated_tokens for event in events] == [1, 2, 3, 4, 5]
    assert all(event.logprob == -0.25 and len(event.top) == 1 for event in events)
    assert {event.num_cached_tokens for event in events} == {3}
    assert vllm.made[-1].is_shut_down


def test_parameters_by_the_librarys_names(vllm):
    asked = request(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=4,
        min_new_tokens=2,
        stop_token_ids=(99,),
        logit_bias=((5, 2.0),),
        banned_token_ids=(6,),
        allowed_token_ids=(5, 7),
        grammar=Grammar.regex("a+"),
        salt="s",
    )
    events = served(asked)
    assert {event.seed for event in events} == {4}
    prompt, params, _, _ = vllm.made[-1].calls[-1]
    assert prompt == {"prompt_token_ids": [20, 30], "cache_salt": "s"}
    expected = {
        "n": 1,
        "max_tokens": 5,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 4,
        "stop_token_ids": [99, 1],
        "logit_bias": {5: 2.0, 6: -1e9},
        "allowed_token_ids": [5, 7],
        "detokenize": False,
    }
    assert {name: getattr(params, name) for name in expected} == expected
    assert params.structured_outputs.regex == "a+"


def test_typical_sampling_is_refused(vllm):
    with pytest.raises(UserError, match="vLLM has no typical sampling") as raised:
        served(request(temperature=1.0, typical_p=0.9))
    assert raised.value.field == "typical_p"
    served(request(typical_p=0.9))  # greedy: it changes nothing


def test_ends(vllm):
    assert served(request((20, 30), stop_token_ids=(32,)))[-1].stop == 32
    last = served(request((20, -1 + 1)))[-1]  # token 1 follows, which ends the text
    assert (last.finish_reason, last.text) == (FinishReason.EOS, "")
    ignored = served(request((20, 0), ignore_eos=True))
    assert ignored[-1].finish_reason is FinishReason.LENGTH


def test_a_stop_text_ends_a_choice_and_aborts(vllm):
    plain = served(request(max_new_tokens=20))
    text = "".join(event.text for event in plain)
    stop = text[4:6]
    events = served(request(max_new_tokens=20, stop=(stop,)))
    assert "".join(event.text for event in events) == text[: text.index(stop)]
    assert (events[-1].finish_reason, events[-1].stop) == (FinishReason.STOP, stop)
    assert vllm.made[-1].aborted == ["r"]


def test_choices_and_prompt(vllm):
    events = served(request(n=2, prompt_logprobs=1, logprobs=0, echo=True))
    prompt, *tokens = events
    scores = [(t.token_id, t.logprob, t.rank) for t in prompt.prompt]
    assert scores == [(20, None, None), (30, -1.5, 9)]
    assert [top.token_id for top in prompt.prompt[1].top] == [7]
    choices = [[e.token_id for e in tokens if e.choice == i] for i in (0, 1)]
    assert choices == [[31, 32, 33, 34, 35], [32, 34, 36, 38, 40]]
    assert all(event.top == () for event in tokens)


def test_leaving_aborts_and_is_counted(vllm):
    class Finished(NullObserver):
        reasons = []

        def on_finish(self, reason):
            self.reasons.append(reason)

    async def main():
        async with open_backend(config(), Finished()) as engine:
            batches = engine.generate_batches(request(max_new_tokens=90))
            await anext(batches)
            running = engine.stats().num_running
            await batches.aclose()
            return running, engine.stats()

    running, stats = run(main())
    assert running == 1
    assert (stats.num_running, stats.num_waiting, stats.totals.num_finished_requests) == (0, 0, 1)
    assert vllm.made[-1].aborted == ["r"]
    assert Finished.reasons == [FinishReason.ABORT]


def test_limits(vllm):
    assert len(served(request(range(10, 20), max_new_tokens=None, ignore_eos=True))) == 118

    async def full():
        async with open_backend(config(max_num_seqs=1, max_queue_size=1)) as engine:
            open_ones = [
                engine.generate_batches(request(request_id=name, max_new_tokens=90))
                for name in "ab"
            ]
            for batches in open_ones:
                await anext(batches)
            try:
                await events_of(engine, request())
            finally:
                for batches in open_ones:
                    await batches.aclose()

    with pytest.raises(CapacityError, match="at most 2 may"):
        run(full())
    for asked, message in (
        (request(range(10, 200)), "at most 127"),
        (request((400,)), "token id 400 is out of vocabulary"),
        (request(repetition_penalty=3.0), "vLLM refuses the request"),
        (request(grammar=Grammar.lark("start: A")), "only JSON schemas"),
        (request(temperature=-1.0), "temperature"),
        (replace(request(), max_queue_s=1.0), "max_queue_s is not available with vllm"),
    ):
        with pytest.raises(UserError, match=message):
            served(asked)


def test_a_dead_engine(vllm):
    async def main():
        async with open_backend(config()) as engine:
            batches = engine.generate_batches(request(max_new_tokens=90))
            await anext(batches)
            vllm.made[-1].errored = True
            assert not engine.healthy
            async for _ in batches:
                pass

    with pytest.raises(EngineError, match="the process ended"):
        run(main())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"no_such": 1}, ConfigError, r"no engine argument no_such; leave option\.no_such out"),
        ({"dtype": "int3"}, ConfigError, "vLLM refuses the configuration: unknown dtype int3"),
    ],
)
def test_arguments_are_checked(vllm, arguments, error, message):
    with pytest.raises(error, match=message):
        served(request(), arguments=arguments)


def test_loading_fails(vllm, tmp_path):
    model = tmp_path / "missing"
    model.symlink_to(cached_checkpoint("llama2"))

    async def main():
        async with open_backend(LibraryConfig(backend="vllm", model=model)):
            pass

    with pytest.raises(ModelError, match=r"vLLM can't load .*missing: no such model"):
        run(main())


def test_without_the_library(monkeypatch):
    forget("vllm")
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match=r"lmi-core\[vllm\]"):
        served(request())


def test_from_properties_to_arguments(vllm, tmp_path):
    model = model_with(
        tmp_path,
        "option.rolling_batch=vllm\noption.dtype=bf16\noption.max_model_len=64\n"
        "option.max_rolling_batch_size=7\noption.tensor_parallel_degree=2\n"
        "option.speculative_draft_model=d\noption.speculative_length=3\n"
        'option.kv_transfer_config={"kv_role": "kv_both"}\njob_queue_size=9\n'
        "option.output_formatter=json\noption.enforce_eager=true\n",
    )
    host = Host(num_gpus=2, packages=HOST.packages)
    resolved = resolve((str(model),), {}, host).models[0]
    made = resolved.library_config(model)
    assert (made.max_num_seqs, made.max_queue_size) == (7, 9)
    assert dict(made.arguments) == {
        "dtype": "bfloat16",
        "max_model_len": 64,
        "max_num_seqs": 7,
        "tensor_parallel_size": 2,
        "speculative_config": {"model": "d", "num_speculative_tokens": 3},
        "kv_transfer_config": {"kv_role": "kv_both"},
        "enforce_eager": True,
    }

    async def main():
        async with open_backend(made) as engine:
            assert engine.max_model_len == 64
            assert await engine.encode("The fox")
            return await events_of(engine, request())

    assert len(run(main())) == 5
    args = vllm.made[-1].args
    assert (args.model, args.served_model_name) == (str(model), "model")


LORA = {
    "lora": LoraConfig(max_rank=32, adapters=(("fr", Path("/adapters/fr")),)),
    "arguments": {"enable_lora": True},
}


def with_adapter(name, **more):
    return replace(request(**more), adapter=name)


def test_adapters_are_vllms_lora_requests(vllm):
    async def main():
        async with open_backend(config(**LORA)) as engine:
            assert engine.adapters == {"fr": Path("/adapters/fr")}
            for name in ("", "fr"):
                assert await events_of(engine, with_adapter(name))
            base, french = vllm.made[-1].lora_requests
            assert base is None
            assert (french.lora_int_id, french.lora_path) == (1, "/adapters/fr")
            with pytest.raises(UserError, match="Adapter de is not registered; registered are fr"):
                await events_of(engine, with_adapter("de"))

    run(main())


def test_an_adapter_may_answer_what_names_none(vllm):
    async def main():
        lora = replace(LORA["lora"], default="fr")
        async with open_backend(config(**{**LORA, "lora": lora})) as engine:
            assert await events_of(engine, with_adapter(""))
            (french,) = vllm.made[-1].lora_requests
            assert french.lora_path == "/adapters/fr"

    run(main())


def test_a_name_belongs_to_the_adapter_that_is_being_loaded(vllm):
    async def main():
        async with open_backend(config(**LORA)) as engine:
            loads = [engine.load_adapter("x", Path(f"/adapters/{i}")) for i in range(2)]
            first, second = await asyncio.gather(*loads, return_exceptions=True)
            assert first is None
            assert isinstance(second, UserError)
            assert "Adapter x is registered already" in str(second)
            assert engine.adapters["x"] == Path("/adapters/0")
            assert len(vllm.made[-1].loras) == 2
            with pytest.raises(ModelError):
                await engine.load_adapter("y", Path("/broken"))
            await engine.load_adapter("y", Path("/adapters/y"))

    run(main())


def test_an_adapter_that_is_loaded_again_is_another_one_to_vllm(vllm):
    """Which keeps cached blocks by name and number."""

    async def main():
        async with open_backend(config(**LORA)) as engine:
            made = vllm.made[-1]
            await engine.unload_adapter("fr")
            assert (engine.adapters, made.loras) == ({}, {})
            await engine.load_adapter("fr", Path("/adapters/other"))
            await events_of(engine, with_adapter("fr"))
            (french,) = made.lora_requests
            assert (french.lora_name, french.lora_int_id) == ("fr#2", 2)
            with pytest.raises(UserError, match="Adapter fr is registered already"):
                await engine.load_adapter("fr", Path("/adapters/fr"))
            with pytest.raises(
                ModelError, match="can't load the adapter /broken: Call to add_lora"
            ):
                await engine.load_adapter("x", Path("/broken"))
            assert list(engine.adapters) == ["fr"]

    run(main())


def test_without_lora_there_are_no_adapters(vllm):
    async def main():
        async with open_backend(config()) as engine:
            for refused in (
                engine.load_adapter("fr", Path("/adapters/fr")),
                engine.unload_adapter("fr"),
                events_of(engine, with_adapter("fr")),
            ):
                with pytest.raises(UserError, match="LoRA is not enabled"):
                    await refused

    run(main())


def test_what_a_configuration_says_of_adapters_reaches_vllm(tmp_path):
    model = tmp_path / "model"
    (model / "adapters" / "fr").mkdir(parents=True)
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (model / "serving.properties").write_text(
        "engine=Python\noption.rolling_batch=vllm\noption.enable_lora=true\n"
        "option.max_loras=8\noption.lora_dtype=bf16\n"
    )
    (resolved,) = resolve((str(model),), {}, HOST).models
    assert resolved.backend == "vllm"
    made = resolved.library_config(model, [("de", Path("/adapters/de"))])
    assert made.lora.adapters == (("fr", model / "adapters/fr"), ("de", Path("/adapters/de")))
    wanted = {"enable_lora": True, "max_loras": 8, "max_lora_rank": 16, "lora_dtype": "bfloat16"}
    assert wanted.items() <= made.arguments.items()
