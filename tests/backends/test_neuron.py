"""The Neuron adapter: vLLM's, scripted, with the arguments of its plugin for Neuron devices."""

import sys

import pytest

from lmi_core.backends.open_backend import open_backend
from lmi_core.config.resolve import resolve
from lmi_core.config.targets.host import Host
from lmi_core.errors import EngineError, MissingExtraError, UserError
from lmi_core.settings.library_config import LibraryConfig
from lmi_core.structured.grammar import Grammar
from tests.backends import library
from tests.backends.library import HERE, events_of, imported, model_with, request
from tests.checkpoints import cached_checkpoint
from tests.engine.harness import run

ON_DEVICE = {"on_device_sampling_config": {"temperature": "0.7"}}
ENFORCED = {**ON_DEVICE, "enable_structured_outputs": True}


@pytest.fixture
def vllm(monkeypatch):
    """The scripted library with the plugin beside it; returns its engine class."""
    monkeypatch.syspath_prepend(str(HERE / "fake_neuron"))
    for module in imported(monkeypatch, "fake_vllm", "vllm", "vllm.v1.engine.async_llm"):
        yield module.AsyncLLM


def served(asked, **neuron_config):
    arguments = {"additional_config": {"neuron_config": neuron_config}} if neuron_config else {}
    model = cached_checkpoint("llama2")
    config = LibraryConfig(backend="neuron", model=model, arguments=arguments)
    return library.served(asked, config)


def test_the_host_samples_as_vllm_does(vllm):
    events = served(request(logprobs=1, min_p=0.5, repetition_penalty=1.5, temperature=1.0))
    assert [event.token_id for event in events] == [31, 32, 33, 34, 35]
    _, params, _, _ = vllm.made[-1].calls[-1]
    assert (params.min_p, params.repetition_penalty, params.logprobs) == (0.5, 1.5, 1)


def test_the_device_samples_with_what_it_has(vllm):
    asked = request(temperature=0.5, top_k=3, top_p=0.9, grammar=Grammar.regex("a+"))
    assert len(served(asked, **ENFORCED)) == 5
    assert vllm.made[-1].calls[-1][1].structured_outputs.regex == "a+"


@pytest.mark.parametrize(
    "field",
    [
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"min_new_tokens": 1},
        {"logit_bias": ((5, 1.0),)},
        {"banned_token_ids": (5,)},
        {"allowed_token_ids": (5,)},
        {"logprobs": 0},
    ],
    ids=lambda field: next(iter(field)),
)
def test_the_device_is_not_asked_for_what_it_would_ignore(vllm, field):
    with pytest.raises(UserError, match="samples on the device here") as caught:
        served(request(**field), **ON_DEVICE)
    assert str(caught.value).startswith(f"{caught.value.field}: ")
    asked = {"banned_token_ids": "suppress_tokens"}
    assert [caught.value.field] == [asked.get(name, name) for name in field]
    assert not vllm.made[-1].calls


@pytest.mark.parametrize("neuron_config", [{}, ON_DEVICE, {"enable_structured_outputs": True}])
def test_grammars_need_what_enforces_them(vllm, neuron_config):
    with pytest.raises(UserError, match="vLLM Neuron enforces grammars only where") as caught:
        served(request(grammar=Grammar.regex("a+", field="regex")), **neuron_config)
    assert caught.value.field == "regex"


def test_prompts_are_not_scored(vllm):
    with pytest.raises(UserError, match="doesn't score prompts") as caught:
        served(request(prompt_logprobs=0))
    assert caught.value.field == "prompt_logprobs"


def test_without_the_plugin(monkeypatch):
    for _ in imported(monkeypatch, "fake_vllm", "vllm", "vllm"):
        with pytest.raises(MissingExtraError, match=r"lmi-core\[neuron\]"):
            served(request())


def test_the_errors_of_its_release_of_vllm(vllm, monkeypatch):
    """Before 0.27 refusals are ValueErrors, and failures have no base."""

    class ValidationError(ValueError):
        pass

    monkeypatch.delattr(sys.modules["vllm.exceptions"], "VLLMClientError")
    monkeypatch.setattr(sys.modules["vllm.sampling_params"], "VLLMValidationError", ValidationError)
    with pytest.raises(UserError, match="vLLM refuses the request: repetition_penalty"):
        served(request(repetition_penalty=3.0))

    class DeadError(Exception):
        pass

    monkeypatch.setattr(sys.modules["vllm.v1.engine.async_llm"], "EngineDeadError", DeadError)

    async def main():
        config = LibraryConfig(backend="neuron", model=cached_checkpoint("llama2"))
        async with open_backend(config) as engine:
            batches = engine.generate_batches(request(max_new_tokens=90))
            await anext(batches)
            vllm.made[-1].errored = True
            async for _ in batches:
                pass

    with pytest.raises(EngineError, match=r"vLLM failed \(DeadError\): the process ended"):
        run(main())


def test_from_properties_to_arguments(vllm, tmp_path):
    model = model_with(
        tmp_path,
        "option.entryPoint=djl_python.transformers_neuronx\noption.tensor_parallel_degree=2\n"
        "option.n_positions=64\noption.context_length_estimate=32,16\n"
        "option.neuron_optimize_level=2\noption.block_size=16\n",
    )
    host = Host(num_neuron_cores=2, packages=frozenset({"vllm_neuron"}))
    made = resolve((str(model),), {}, host).models[0].library_config(model)

    async def main():
        async with open_backend(made) as engine:
            assert engine.max_model_len == 64
            return await events_of(engine, request())

    assert len(run(main())) == 5
    args = vllm.made[-1].args
    assert (args.tensor_parallel_size, args.max_num_seqs, args.dtype) == (2, 32, "auto")
    assert args.max_num_batched_tokens == 32
    buckets = {"num_batched_tokens_buckets": [16, 32]}
    assert args.additional_config == {"neuron_config": buckets}
