"""Which backend serves a configuration, with what reason and what way out."""

import pytest

from lmi_core.config.targets.host import Host
from lmi_core.errors import ConfigError

LLAMA = {"architectures": ["LlamaForCausalLM"]}


def model_of(report):
    (model,) = report.models
    return model


@pytest.mark.parametrize(
    ("properties", "system", "entry_point", "mpi_mode"),
    [
        ("", "common", "djl_python.huggingface", False),
        ("engine=Python", "common", "djl_python.huggingface", False),
        ("engine=DeepSpeed", "deepspeed", "djl_python.deepspeed", True),
        ("engine=FasterTransformer", "fastertransformer", "djl_python.fastertransformer", True),
        ("engine=MPI", "common", "djl_python.huggingface", True),
        ("engine=MPI\noption.rolling_batch=auto", "lmi_dist", "djl_python.huggingface", True),
        (
            "engine=DeepSpeed\noption.entryPoint=djl_python.huggingface\n"
            "option.rolling_batch=scheduler",
            "scheduler",
            "djl_python.huggingface",
            True,
        ),
        ("option.rolling_batch=lmi-dist", "lmi_dist", "djl_python.huggingface", False),
        ("option.rolling_batch=scheduler", "scheduler", "djl_python.huggingface", False),
        ("option.rolling_batch=disable", "accelerate", "djl_python.huggingface", False),
        (
            "option.entryPoint=djl_python.huggingface",
            "accelerate",
            "djl_python.huggingface",
            False,
        ),
        (
            "option.entryPoint=djl_python.transformers_neuronx",
            "neuronx",
            "djl_python.transformers_neuronx",
            False,
        ),
        ("option.rolling_batch=tnx", "neuronx", "djl_python.huggingface", False),
    ],
)
def test_written_for_and_served_natively(
    model_dir, explained, properties, system, entry_point, mpi_mode
):
    report = explained(model_dir(properties, config=LLAMA))
    model = model_of(report)
    assert not report.errors
    assert (model.system, model.backend) == (system, "lmi")
    assert (model.entry_point, model.mpi_mode) == (entry_point, mpi_mode)


@pytest.mark.parametrize(
    ("properties", "backend", "missing"),
    [
        ("option.rolling_batch=vllm", "vllm", "vLLM is not installed"),
        ("option.rolling_batch=trtllm\nengine=MPI", "trtllm", "TensorRT-LLM is not installed"),
        ("option.entryPoint=djl_python.tensorrt_llm", "trtllm", "TensorRT-LLM is not installed"),
        (
            "option.entryPoint=djl_python.lmi_vllm.vllm_async_service",
            "vllm",
            "vLLM is not installed",
        ),
    ],
)
def test_a_wanted_engine_that_is_missing_is_replaced_or_names_the_way_out(
    model_dir, explained, properties, backend, missing
):
    name = model_dir(properties, config=LLAMA)
    replaced = explained(name)
    assert not replaced.errors
    assert model_of(replaced).backend == "lmi"
    honoured = f"{missing}, and the lmi engine honours every key that is set"
    assert model_of(replaced).reason.endswith(honoured)
    (warning,) = [each for each in map(str, replaced.warnings) if "installed" in each]
    assert warning.startswith(f"model/serving.properties:1: {honoured}: it serves the model; pip")
    report = explained(name, "--strict")
    assert model_of(report).backend == backend
    (error,) = report.errors
    assert missing in str(error)
    assert "--prefer-native serves it with the lmi engine" in str(error)
    assert str(error).startswith("model/serving.properties:1: ")
    preferred = explained(name, "--prefer-native")
    assert model_of(preferred).backend == "lmi"
    assert not preferred.errors
    assert not [each for each in map(str, preferred.warnings) if "installed" in each]


@pytest.mark.parametrize(
    ("line", "host", "way_out"),
    [
        (
            "option.of_vllm=1",
            Host(),
            "--prefer-native serves it with the lmi engine, without option.of_vllm",
        ),
        (
            "option.load_format=dummy",
            Host(),
            "the lmi engine could serve it, but for this: model/serving.properties:2: "
            "option.load_format=dummy: not available in this version: random weights",
        ),
        (
            "option.pipeline_parallel_degree=4",
            Host(num_gpus=4),
            "has no pipelines: write option.tensor_parallel_degree=4 for as many GPUs",
        ),
        (
            "option.tensor_parallel_degree=4",
            Host(),
            "--device cpu serves the model on the CPU, by 4 processes with a slice",
        ),
    ],
)
def test_an_engine_that_is_missing_is_not_replaced_by_one_that_lacks_a_key(
    model_dir, explained, line, host, way_out
):
    report = explained(model_dir(f"option.rolling_batch=vllm\n{line}", config=LLAMA), host=host)
    assert model_of(report).backend == "vllm"
    error = next(each for each in map(str, report.errors) if "is not installed" in each)
    assert "pip install 'lmi-core[vllm]'" in error
    assert way_out in error


@pytest.mark.parametrize("argv", [(), ("--prefer-native",)])
def test_padded_batches_that_are_forced_are_replaced_by_none_without(model_dir, explained, argv):
    report = explained(model_dir("option.force_padded=true", config=LLAMA), *argv)
    assert model_of(report).backend == "transformers"
    error = next(each for each in map(str, report.errors) if "is not installed" in each)
    assert error.startswith("model/serving.properties:1: option.force_padded=true: Transformers is")
    assert "pip install 'lmi-core[transformers]'" in error


def test_a_mistake_is_not_what_keeps_our_engine_from_standing_in(model_dir, explained):
    report = explained(model_dir("option.rolling_batch=vllm\noption.dtype=fp17", config=LLAMA))
    assert model_of(report).backend == "lmi"
    (error,) = report.errors
    assert "option.dtype='fp17'" in str(error)


@pytest.mark.parametrize(
    ("features", "properties", "config", "system"),
    [
        ("vllm,lmi-dist", "", {"model_type": "llama"}, "lmi_dist"),
        ("vllm,lmi-dist", "engine=Python\noption.rolling_batch=auto", {}, "lmi_dist"),
        ("vllm,lmi-dist", "", {"model_type": "gpt_neox"}, "scheduler"),
        ("vllm,lmi-dist", "option.rolling_batch=vllm", {"model_type": "llama"}, "vllm"),
        ("vllm,lmi-dist", "option.rolling_batch=disable", {"model_type": "llama"}, "accelerate"),
        ("vllm,lmi-dist", "batch_size=4", {"model_type": "llama"}, "common"),
        ("trtllm", "", {"model_type": "llama"}, "trtllm"),
        ("trtllm", "engine=MPI\noption.rolling_batch=auto", {}, "trtllm"),
        ("vllm", "", {"model_type": "llama"}, "vllm"),
        ("vllm,lmi-dist", "", {"architectures": ["BertModel"]}, "common"),
        ("", "", {"model_type": "llama"}, "common"),
    ],
)
def test_the_containers_libraries_choose_as_in_lmi(
    model_dir, explained, features, properties, config, system
):
    name = model_dir(properties, config=LLAMA | config)
    host = Host(num_gpus=1, packages=frozenset({"vllm", "tensorrt_llm"}))
    report = explained(name, environ={"SERVING_FEATURES": features}, host=host)
    model = model_of(report)
    assert model.system == system
    if system in ("vllm", "trtllm"):
        assert model.backend == system
    if system == "trtllm":
        assert model.reason == "SERVING_FEATURES=trtllm"
    launched = explained("--model-id", name, environ={"SERVING_FEATURES": features}, host=host)
    assert model_of(launched).system == "tgi"


@pytest.mark.parametrize(
    ("backend", "package", "batch"),
    [("vllm", "vllm", "max_num_seqs"), ("trtllm", "tensorrt_llm", "max_batch_size")],
)
def test_a_package_that_is_missing_and_one_that_is_there(
    model_dir, explained, backend, package, batch
):
    name = model_dir(f"option.rolling_batch={backend}\noption.dtype=fp16", config=LLAMA)
    (error,) = explained(name, "--strict").errors
    assert f"pip install 'lmi-core[{backend}]'" in str(error)
    report = explained(name, host=Host(num_gpus=1, packages=frozenset({package})))
    assert not report.errors
    assert dict(model_of(report).library.arguments) == {"dtype": "float16", batch: 256}


@pytest.mark.parametrize("rolling_batch", ["tnx", "vllm"])
def test_neuron_devices_choose_neuron(model_dir, explained, rolling_batch):
    name = model_dir(f"option.rolling_batch={rolling_batch}", config=LLAMA)
    report = explained(name, host=Host(num_neuron_cores=2))
    assert model_of(report).backend == "neuron"
    assert "2 Neuron cores" in model_of(report).reason


@pytest.mark.parametrize(
    "properties", ["", "option.rolling_batch=auto\nengine=MPI", "option.rolling_batch=disable"]
)
@pytest.mark.parametrize("degree", ["2", "max"])
def test_a_degree_of_parallelism_chooses_neuron_on_its_devices(
    model_dir, explained, properties, degree
):
    degree = f"option.tensor_parallel_degree={degree}"
    name = model_dir(f"{properties}\n{degree}", config=LLAMA)
    report = explained(name, host=Host(num_neuron_cores=2))
    model = model_of(report)
    assert (model.backend, model.system) == ("neuron", "neuronx")
    assert model.entry_point == "djl_python.transformers_neuronx"
    assert str(report.errors[0]).startswith(f"{name}/serving.properties:")
    assert f"{degree} on 2 Neuron cores: vLLM Neuron is not installed" in str(report.errors[0])
    for host in (Host(), Host(num_gpus=2, num_neuron_cores=2)):
        assert model_of(explained(name, host=host)).backend == "lmi"


@pytest.mark.parametrize(
    ("properties", "files"),
    [
        ("", {}),
        ("option.tensor_parallel_degree=2\noption.entryPoint=djl_python.huggingface", {}),
        (
            "option.tensor_parallel_degree=2",
            {"model__py": "@output_formatter\ndef f(output): ..."},
        ),
    ],
)
def test_neuron_devices_idle_only_for_those_who_say_so(model_dir, explained, properties, files):
    name = model_dir(properties, config=LLAMA, **files)
    report = explained(name, host=Host(num_neuron_cores=2))
    assert model_of(report).backend == "lmi"
    (error,) = map(str, report.errors)
    assert "2 Neuron cores are visible, and the lmi engine would leave them unused" in error
    assert not explained(name, "--device", "cpu", host=Host(num_neuron_cores=2)).errors


def test_other_architectures_and_tasks_need_transformers(model_dir, explained):
    other = model_dir("", name="other", config={"architectures": ["OtherForCausalLM"]})
    report = explained(other, "--prefer-native")
    assert model_of(report).backend == "transformers"
    assert "no description of OtherForCausalLM" in str(report.errors[0])
    assert "--prefer-native" not in str(report.errors[0])
    task = model_dir("option.task=fill-mask", name="task", config=LLAMA)
    assert model_of(explained(task)).backend == "transformers"


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"architectures": ["MiniCPMForCausalLM"], "num_experts": 8}, "num_experts is 8"),
        (
            {"architectures": ["PhiForCausalLM"], "num_attention_heads": 2, "hidden_size": 64}
            | {"num_hidden_layers": 2, "hidden_act": "quick_gelu"},
            "hidden_act is 'quick_gelu'",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"], "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx is True",
        ),
    ],
)
def test_settings_that_our_engine_lacks_need_transformers(model_dir, explained, config, named):
    report = explained(model_dir("", config=config), "--prefer-native")
    assert model_of(report).backend == "transformers"
    assert named in str(report.errors[0])
    assert "--prefer-native" not in str(report.errors[0])


def test_requirements_are_not_needed_natively(model_dir, explained):
    report = explained(model_dir("", config=LLAMA, requirements__txt="x"))
    assert not report.errors
    assert "the lmi engine runs no code of the model" in str(report.warnings[0])


def test_diffusion_is_refused(model_dir, resolved):
    with pytest.raises(ConfigError, match="image generation"):
        resolved(model_dir("option.entryPoint=djl_python.stable_diffusion"))


def test_weights_that_cannot_be_read_yet_are_refused(model_dir, resolved):
    name = model_dir("option.load_format=dummy", config=LLAMA)
    with pytest.raises(ConfigError, match="not available in this version: random weights"):
        resolved(name)


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ("option.quantize=bitsandbytes8", "bitsandbytes"),
        ("option.load_in_4bit=true", "bitsandbytes-fp4"),
        ("option.rolling_batch=lmi-dist\noption.dtype=int8", "int8"),
        ("", None),
    ],
)
def test_quantisation_at_load(model_dir, resolved, properties, expected):
    resolution = resolved(model_dir(properties, config=LLAMA))
    assert resolution.models[0].engine.config.quantize == expected


def test_speculation_only_tunes(model_dir, explained):
    name = model_dir("option.rolling_batch=lmi-dist\noption.speculative_length=3", config=LLAMA)
    report = explained(name)
    row = next(row for row in report.rows[0] if row.key == "option.speculative_length")
    assert row.outcome == "no effect"
    assert not report.errors


@pytest.mark.parametrize(
    ("properties", "architecture", "purpose"),
    [
        ("", "Qwen3Model", "served for embeddings"),
        ("", "MistralForSequenceClassification", "served for scores of pairs of texts"),
        ("option.task=text_embedding", "Qwen3ForCausalLM", "served for embeddings"),
        ("option.task=text-ranking", "Qwen3ForCausalLM", "served for scores of pairs of texts"),
        ("option.task=text-generation", "Qwen3ForCausalLM", "Qwen3ForCausalLM"),
    ],
)
def test_what_a_model_is_served_for(model_dir, explained, properties, architecture, purpose):
    model = model_of(explained(model_dir(properties, config={"architectures": [architecture]})))
    assert model.backend == "lmi"
    assert model.reason.endswith(purpose)


def test_embeddings_of_other_backends_are_refused(model_dir, explained):
    name = model_dir("engine=MPI\noption.rolling_batch=vllm\noption.task=embed", config=LLAMA)
    report = explained(name, host=Host(packages=frozenset({"vllm"})))
    assert "option.task=embed" in str(report.errors[0])
    engine = model_of(explained(name, "--prefer-native")).engine
    assert engine is not None
    assert engine.config.task == "embed"
