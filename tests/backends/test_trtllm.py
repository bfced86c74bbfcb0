"""The TensorRT-LLM adapter against a scripted library with the LLM API's names and shapes."""

import sys
from types import SimpleNamespace

import pytest
import torch

from lmi_core.backends.open_backend import open_backend
from lmi_core.backends.trtllm_choices import TrtllmChoices
from lmi_core.backends.trtllm_sampling import request_priority
from lmi_core.config.resolve import resolve
from lmi_core.config.targets.host import Host
from lmi_core.engine.outputs import FinishReason
from lmi_core.engine.sampling_params import SamplingParams
from lmi_core.errors import ConfigError, EngineError, MissingExtraError, ModelError, UserError
from lmi_core.settings.library_config import LibraryConfig
from lmi_core.structured.grammar import Grammar
from tests.backends import library
from tests.backends.library import events_of, forget, imported, model_with, request
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import run


@pytest.fixture
def llm(monkeypatch):
    """The scripted library, importable as tensorrt_llm; returns its LLM class."""
    for module in imported(monkeypatch, "fake_trtllm", "tensorrt_llm", "tensorrt_llm.llmapi"):
        yield module.LLM


def config(**more):
    arguments = more.pop("arguments", {})
    model = cached_checkpoint("llama2")
    return LibraryConfig(backend="trtllm", model=model, arguments=arguments, **more)


def served(asked, **arguments):
    return library.served(asked, config(arguments=arguments))


def test_what_is_new_becomes_events(llm):
    events = served(request(logprobs=1))
    assert [event.token_id for event in events] == [31, 32, 33, 34, 35]
    assert [event.finish_reason for event in events] == [None] * 4 + [FinishReason.LENGTH]
    assert all(event.logprob == -0.25 and len(event.top) == 1 for event in events)
    assert {event.num_cached_tokens for event in events} == {3}
    made = llm.made[-1]
    assert made.is_shut_down
    assert made.num_aborted == 0
    assert (made.args["max_seq_len"], made.args["guided_decoding_backend"]) == (512, "xgrammar")


def test_parameters_by_the_librarys_names(llm):
    asked = request(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        seed=2**63 + 4,
        stop_token_ids=(99,),
        logit_bias=((5, 2.0),),
        banned_token_ids=(6,),
        grammar=Grammar.regex("a+"),
        salt="s",
        priority=1,
    )
    served(asked)
    ids, params, salt, priority = llm.made[-1].calls[-1]
    assert (ids, salt, priority) == ([20, 30], "s", 0.25)
    expected = {
        "n": 1,
        "max_tokens": 5,
        "min_tokens": None,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "prompt_ignore_length": 2,
        "seed": 4,
        "end_id": 1,
        "pad_id": 1,
        "stop_token_ids": [99],
        "bad_token_ids": [6],
        "include_stop_str_in_output": True,
        "ignore_eos": False,
        "detokenize": False,
    }
    assert {name: getattr(params, name) for name in expected} == expected
    bias = torch.zeros(384)
    bias[5] = 2
    assert torch.equal(params.embedding_bias, bias)
    assert params.guided_decoding.regex == "a+"


def test_a_greedy_request_sets_nothing_else(llm):
    served(request(seed=3, min_new_tokens=2))
    params = llm.made[-1].calls[-1][1]
    unset = ("top_k", "top_p", "min_p", "seed", "repetition_penalty", "embedding_bias")
    assert {name: getattr(params, name) for name in unset} == dict.fromkeys(unset)
    assert (params.temperature, params.min_tokens) == (0, 2)


def test_allowed_tokens_are_refused(llm):
    with pytest.raises(UserError, match="not available with TensorRT-LLM") as caught:
        served(request(allowed_token_ids=(5,)))
    assert caught.value.field == "allowed_token_ids"


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (Grammar.json_schema({"type": "null"}), {"json": '{"type":"null"}'}),
        (Grammar.choice(["a b", 'say "ü"']), {"grammar": r'root ::= "a b" | "say \"ü\""'}),
    ],
)
def test_grammars(llm, grammar, expected):
    served(request(grammar=grammar))
    rule = llm.made[-1].calls[-1][1].guided_decoding
    assert {name: getattr(rule, name) for name in expected} == expected


def test_ends(llm):
    assert served(request((20, 30), stop_token_ids=(32,)))[-1].stop == 32
    last = served(request((20, 0)))[-1]  # token 1 follows, which ends the text
    assert (last.finish_reason, last.text) == (FinishReason.EOS, "")
    ignored = served(request((20, 0), ignore_eos=True, stop_token_ids=(4,)))
    assert (ignored[-1].finish_reason, ignored[-1].stop) == (FinishReason.STOP, 4)
    assert [event.token_id for event in ignored] == [1, 2, 3, 4]


@pytest.mark.parametrize("reason", ["timeout", "cancelled", "stop"])
def test_an_end_that_is_none(reason):
    choice = SimpleNamespace(index=0, token_ids=[31], logprobs=[], finish_reason=reason)
    result = SimpleNamespace(outputs=[choice], cached_tokens=0)
    choices = TrtllmChoices(SamplingParams(max_new_tokens=5), (), (30,))
    with pytest.raises(EngineError, match=f"ended a request after 1 tokens: {reason}"):
        choices.take(result)


def test_an_end_that_is_not_among_the_ids(llm, monkeypatch):
    monkeypatch.setattr(llm, "leaves_end_out", True)
    (last,) = served(request((20, 0)))
    assert (last.token_id, last.finish_reason) == (1, FinishReason.EOS)


def test_a_stop_text_ends_a_choice_and_aborts(llm):
    plain = served(request(max_new_tokens=20))
    text = "".join(event.text for event in plain)
    stop = text[4:6]
    events = served(request(max_new_tokens=20, stop=(stop,)))
    assert "".join(event.text for event in events) == text[: text.index(stop)]
    assert (events[-1].finish_reason, events[-1].stop) == (FinishReason.STOP, stop)
    assert llm.made[-1].num_aborted == 1


def test_choices_and_prompt(llm):
    asked = request(
        n=2, temperature=1.0, prompt_logprobs=1, logprobs=0, echo=True, stop_token_ids=(34,)
    )
    prompt, *tokens = served(asked)
    scores = [(t.token_id, t.logprob, t.rank) for t in prompt.prompt]
    assert scores == [(20, None, None), (30, -1.5, 9)]
    assert [top.token_id for top in prompt.prompt[1].top] == [7]
    choices = [[e.token_id for e in tokens if e.choice == i] for i in (0, 1)]
    assert choices == [[31, 32, 33, 34], [32, 34]]
    reasons = [e.finish_reason for e in tokens if e.finish_reason is not None]
    assert reasons == [FinishReason.STOP] * 2
    assert all(event.top == () for event in tokens)


def test_a_prompt_that_was_not_scored_whole(llm):
    async def main():
        async with open_backend(config()) as engine:
            llm.made[-1].num_unscored = 2
            return await events_of(engine, request((20, 25, 30), prompt_logprobs=0))

    with pytest.raises(EngineError, match=r"scored 1 of .* 2 tokens .*enable_kv_cache_reuse=false"):
        run(main())


def test_leaving_aborts(llm):
    async def main():
        async with open_backend(config()) as engine:
            batches = engine.generate_batches(request(max_new_tokens=90))
            await anext(batches)
            await batches.aclose()
            return engine.stats().num_running

    assert run(main()) == 0
    assert llm.made[-1].num_aborted == 1


def test_what_a_request_can_not_have(llm):
    for asked, message, field in (
        (request(grammar=Grammar.lark("start: A")), "only JSON schemas", "grammar"),
        (
            request(min_new_tokens=2, stop_token_ids=(9,)),
            "min_new_tokens=2: .* 1 more",
            "min_new_tokens",
        ),
        (request(temperature=1.0, typical_p=0.9), "LLM has no typical sampling", "typical_p"),
        (request(n=2), "n=2: TensorRT-LLM gives one choice at temperature 0", "n"),
        (request(range(10, 30)), "refuses the request: The sum of prompt length", None),
    ):
        with pytest.raises(UserError, match=message) as caught:
            served(asked, max_num_tokens=16)
        assert caught.value.field == field


def test_a_dead_engine(llm):
    async def main():
        async with open_backend(config()) as engine:
            llm.made[-1].failure = OSError("the process ended")
            try:
                await events_of(engine, request())
            finally:
                assert not engine.healthy

    with pytest.raises(EngineError, match=r"TensorRT-LLM failed \(OSError\): the process ended"):
        run(main())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"no_such": 1}, "refuses the configuration: LLM got invalid argument: no_such"),
        ({"kv_cache_config": {"no_such": 1}}, "unexpected keyword argument 'no_such'"),
        ({"scheduler_config": {"capacity_scheduler_policy": "some"}}, "not a valid Capacity"),
    ],
)
def test_arguments_are_checked(llm, arguments, message):
    with pytest.raises(ConfigError, match=message):
        served(request(), **arguments)


def test_loading_fails(llm, tmp_path):
    model = tmp_path / "missing"
    model.symlink_to(cached_checkpoint("llama2"))
    with pytest.raises(ModelError, match=r"TensorRT-LLM can't load .*missing: no such model"):
        library.served(request(), LibraryConfig(backend="trtllm", model=model))


def test_without_the_library(monkeypatch):
    forget("tensorrt_llm")
    monkeypatch.setitem(sys.modules, "tensorrt_llm", None)
    with pytest.raises(MissingExtraError, match=r"lmi-core\[trtllm\]"):
        served(request())


@pytest.mark.parametrize("version", ["1.2.1", "0.21.0", "unknown"])
def test_an_old_release(llm, monkeypatch, version):
    monkeypatch.setattr(sys.modules["tensorrt_llm"], "__version__", version)
    with pytest.raises(ConfigError, match=rf"TensorRT-LLM {version} .* 1\.3 or newer"):
        served(request())


def test_priorities_keep_their_order():
    found = [request_priority(priority) for priority in (-(2**40), -2, -1, 0, 1, 2, 2**40)]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)
    assert found[3] == 0.5
    assert all(0 <= priority <= 1 for priority in found)


def test_from_properties_to_arguments(llm, tmp_path):
    model = model_with(
        tmp_path,
        "engine=MPI\noption.rolling_batch=trtllm\noption.dtype=bf16\njob_queue_size=9\n"
        "option.max_input_len=40\noption.max_output_len=24\noption.max_rolling_batch_size=7\n"
        "option.tensor_parallel_degree=2\noption.max_num_tokens=128\noption.tokens_per_block=64\n"
        "option.kv_cache_free_gpu_mem_fraction=0.8\noption.enable_kv_cache_reuse=true\n"
        "option.batch_scheduler_policy=max_utilization\noption.enable_trt_overlap=true\n"
        "option.use_custom_all_reduce=false\noption.enable_chunked_prefill=true\n"
        'option.moe_config={"backend": "CUTLASS"}\noption.output_formatter=json\n',
    )
    host = Host(num_gpus=2, packages=frozenset({"tensorrt_llm"}))
    resolved = resolve((str(model),), {}, host).models[0]
    made = resolved.library_config(model)
    assert (made.max_num_seqs, made.max_queue_size) == (7, 9)

    async def main():
        async with open_backend(made) as engine:
            assert engine.max_model_len == 64
            return await events_of(engine, request())

    assert len(run(main())) == 5
    args = dict(llm.made[-1].args)
    cache, scheduler = args.pop("kv_cache_config"), args.pop("scheduler_config")
    assert args == {
        "model": str(model),
        "dtype": "bfloat16",
        "trust_remote_code": False,
        "max_seq_len": 64,
        "max_batch_size": 7,
        "tensor_parallel_size": 2,
        "max_num_tokens": 128,
        "disable_overlap_scheduler": False,
        "enable_chunked_prefill": True,
        "allreduce_strategy": "NCCL",
        "guided_decoding_backend": "xgrammar",
        "moe_config": {"backend": "CUTLASS"},
    }
    assert (cache.free_gpu_memory_fraction, cache.tokens_per_block) == (0.8, 64)
    assert cache.enable_block_reuse is True
    assert scheduler.capacity_scheduler_policy == "MAX_UTILIZATION"
